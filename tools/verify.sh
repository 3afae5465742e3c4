#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Checks what no test sees: go.mod and go.sum are tidy, the formatting is
# gofmt's, the shell scripts parse, and generated files are those of their
# sources (only where clang is installed).
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

mapfile -t sources < <(git ls-files '*.go')
unformatted=$(gofmt -l "${sources[@]}")
[ -z "$unformatted" ] || fail "not formatted by gofmt: $unformatted"

while read -r script; do
	bash -n "$script" || fail "$script does not parse"
done < <(git ls-files '*.sh' .ci/run)

if command -v clang >/dev/null; then
	"$go" generate ./...
	git diff --exit-code --stat || fail "generated files differ from their sources; run 'make generate' and commit"
else
	echo "verify: no clang here, so generated files were not rebuilt"
fi

[ "$bad" -eq 0 ] || exit 1
echo "verify: ok"
