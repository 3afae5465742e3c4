#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Checks what no test sees: go.mod and go.sum are tidy, the formatting is
# gofmt's, the shell scripts parse, and generated files are those of their
# sources (only where clang and what else that takes are installed).
set -euo pipefail

go=${GO:-go}
bad=0
fail() {
	echo "verify: $*" >&2
	bad=1
}

"$go" mod verify
for dir in . tools/pinned tools/pinned/actionlint tools/pinned/govulncheck tools/cluster/tools tools/cluster/tools/runtime tools/vm/tools; do
	(cd "$dir" && "$go" mod tidy -diff) || fail "$dir/go.mod is not tidy; run 'go mod tidy' in $dir"
done

go_files=$(git ls-files '*.go') # a variable, since the error of a process substitution does not count
mapfile -t sources <<<"$go_files"
unformatted=$(gofmt -l "${sources[@]}")
[ -z "$unformatted" ] || fail "not formatted by gofmt: $unformatted"

scripts=$(git ls-files '*.sh' .ci/run)
while read -r script; do
	bash -n "$script" || fail "$script does not parse"
done <<<"$scripts"

if command -v clang >/dev/null && command -v llvm-strip >/dev/null && [ -e /usr/include/bpf/bpf_helpers.h ]; then
	"$go" generate ./...
	git diff --exit-code --stat || fail "generated files differ from their sources; run 'make generate' and commit"
else
	echo "verify: no clang, llvm-strip or libbpf-dev here, so generated files were not rebuilt"
fi

[ "$bad" -eq 0 ] || exit 1
echo "verify: ok"
