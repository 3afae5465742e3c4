#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Looks for known vulnerabilities that the programs and their tests reach, in
# their modules and in Go's standard library. VULNDB is the
# database, https://vuln.go.dev unless told otherwise; a directory is file:///DIR.
#
# Exit codes: 0 none, 75 not checked, because there is no database, 1 others.
set -euo pipefail
cd "$(dirname "$0")/.."

go=${GO:-go}
db=${VULNDB:-https://vuln.go.dev}
readonly unchecked=75 # EX_TEMPFAIL

case $db in
file://*) [ -r "${db#file://}/index/db.json" ] && there=1 || there= ;;
*) curl --silent --fail --location --max-time 20 --output /dev/null "$db/index/db.json" && there=1 || there= ;;
esac
if [ -z "$there" ]; then
	echo "vuln: not checked: the database $db cannot be read here; VULNDB=file:///DIR names a copy" >&2
	exit $unchecked
fi

tool=$(mktemp -d)
trap 'rm -rf "$tool"' EXIT
"$go" build -modfile=tools/pinned/govulncheck/go.mod -o "$tool/govulncheck" golang.org/x/vuln/cmd/govulncheck
# Both builds of what differs: with libibverbs, and without C.
"$tool/govulncheck" -db "$db" -test ./...
CGO_ENABLED=0 "$tool/govulncheck" -db "$db" ./cmd/...
