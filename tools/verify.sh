#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Checks what no test sees: go.mod and go.sum are tidy, the formatting is
# gofmt's, the shell scripts parse, and generated files are those of their
# sources (eBPF objects only where clang and what else that takes are installed;
# generated_test.go sees to it that none is older than its sources).
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

# In a copy: tests may read the checkout at the same time.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files --cached --others --exclude-standard --deduplicate | tar --ignore-failed-read -cf - -T - | tar -xf - -C "$copy"
git -C "$copy" init -q
git -C "$copy" add --force .
generated=./api/...
if command -v clang >/dev/null && command -v llvm-strip >/dev/null && [ -e /usr/include/bpf/bpf_helpers.h ]; then
	generated=./...
else
	echo "verify: no clang, llvm-strip or libbpf-dev here, so eBPF objects were not rebuilt"
fi
(cd "$copy" && "$go" generate "$generated")
changed=$(git -C "$copy" diff --name-only && git -C "$copy" ls-files --others)
[ -z "$changed" ] || fail "generated files differ from their sources; run 'make generate' and commit:" $changed

[ "$bad" -eq 0 ] || exit 1
echo "verify: ok"
