#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs every fuzz target of the module, each for the given time (60s unless
# told), two at a time on two or more processors. Ends with an error if a target
# finds a failing input; the input stays in the package's testdata/fuzz.
#
# With FUZZTOTAL the time is that of all targets together, in seconds, and those
# are left out of which nothing has changed since they were fuzzed like that: a
# few seconds more of the same would find nothing. FRESH=1 fuzzes them, too.
#
#   [FUZZTOTAL=SECONDS] tools/fuzz.sh [TIME] [PACKAGE_PATTERN]
set -euo pipefail

fuzztime=${1:-60s}
pattern=${2:-./...}
go=${GO:-go}
jobs=$(nproc)
[ "$jobs" -le 4 ] || jobs=4
cache=$("$go" env GOCACHE)/fuzz

# A variable, since the error of a process substitution does not count.
listed=$("$go" list -f '{{.ImportPath}}	{{.Dir}}	{{range .TestGoFiles}}{{.}} {{end}}{{range .XTestGoFiles}}{{.}} {{end}}' "$pattern")

# Package, its directory and target of each "func FuzzX(f *testing.F)".
packages=() targets=()
while IFS=$'\t' read -r pkg dir files; do
	found=
	for file in $files; do
		while read -r name; do
			found=1
			targets+=("$pkg $dir $name")
		done < <(sed -nE 's/^func (Fuzz[A-Za-z0-9_]*)\([a-z]+ \*testing\.F\).*/\1/p' "$dir/$file")
	done
	[ -z "$found" ] || packages+=("$pkg")
done <<<"$listed"

if [ ${#targets[@]} -eq 0 ]; then
	echo "fuzz: no target under $pattern" >&2
	exit 1
fi

# What each package's test was made of when it was last fuzzed with FUZZTOTAL, in a
# file beside the inputs that were found for it; and what it is made of now.
fuzzed() { echo "$cache/$1/fuzzed"; }
declare -A made
if [ -n "${FUZZTOTAL:-}" ]; then
	module=$("$go" list -m)
	inputs=$("$go" run ./tools/inputs)
	changed=()
	for pkg in "${packages[@]}"; do
		variable=KUBE_SMCR_INPUT_$(tr '/.-' '___' <<<"${pkg#"$module"/}.test")
		made[$pkg]=$(sed -n "s/^$variable=//p" <<<"$inputs")
		if [ -z "${made[$pkg]}" ]; then
			echo "fuzz: tools/inputs says nothing of $pkg" >&2
			exit 1
		fi
		if [ -n "${FRESH:-}" ] || [ "$(cat "$(fuzzed "$pkg")" 2>/dev/null)" != "${made[$pkg]}" ]; then
			changed+=("$pkg")
		fi
	done
	all=${#targets[@]}
	mapfile -t targets < <(printf '%s\n' "${targets[@]}" | awk -v packages="${changed[*]}" '
		BEGIN { n = split(packages, p, " "); for (i = 1; i <= n; i++) want[p[i]] = 1 }
		$1 in want')
	packages=("${changed[@]}")
	if [ ${#targets[@]} -eq 0 ]; then
		echo "fuzz: ok, nothing has changed of $all targets since they were fuzzed"
		exit 0
	fi
	milliseconds=$((FUZZTOTAL * 1000 * jobs / ${#targets[@]}))
	fuzztime=$((milliseconds < 5000 ? milliseconds : 5000))ms
	if [ "$all" -gt ${#targets[@]} ]; then
		echo "fuzz: nothing has changed of $((all - ${#targets[@]})) other targets since they were fuzzed"
	fi
fi
echo "fuzz: ${#targets[@]} targets, $fuzztime each, $jobs at a time"

logs=$(mktemp -d)
pids=()
cleanup() {
	for pid in "${pids[@]}"; do
		kill "$pid" 2>/dev/null || true
	done
	wait
	rm -rf "$logs"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# program is the file of a package's fuzz tests.
program() { echo "$logs/${1//\//-}.test"; }

# Each package is built once, instrumented; the name after -fuzz does not matter
# for that.
for pkg in "${packages[@]}"; do
	"$go" test -c -fuzz=Fuzz -o "$(program "$pkg")" "$pkg"
done

# run fuzzes target number $1. Seed inputs ran in the tests, so -test.run matches
# nothing. Making an interesting input small is bounded: by default it may
# take a minute, all of a target's time. The outcome is one line, and the whole
# log if it failed. The fuzzer gets a process group of its own (set -m), so that
# ending it ends its workers.
run() {
	local pkg dir name log=$logs/$1 began=$SECONDS fuzzer
	read -r pkg dir name <<<"${targets[$1]}"
	set -m
	(cd "$dir" && exec "$(program "$pkg")" -test.run='^$' -test.fuzz="^$name\$" -test.fuzztime="$fuzztime" \
		-test.fuzzminimizetime=50x -test.fuzzcachedir="$cache/$pkg" -test.parallel=1 -test.timeout=0) >"$log" 2>&1 &
	fuzzer=$!
	trap 'kill -- -$fuzzer 2>/dev/null || true; exit 143' TERM
	# The fuzzer fails without a finding when its time ends in the middle of an
	# input; a finding is written down.
	if wait "$fuzzer" || { grep -q '^ *context deadline exceeded$' "$log" && ! grep -q 'Failing input written' "$log"; }; then
		printf 'fuzz: ok   %3d/%d  %-28s %s  %s (%ds)\n' $(($1 + 1)) ${#targets[@]} "$name" "$pkg" \
			"$(sed -nE 's/.*execs: ([0-9]+).*/\1 execs/p' "$log" | tail -n 1)" $((SECONDS - began))
		return 0
	fi
	printf 'fuzz: FAIL %3d/%d  %s  %s\n' $(($1 + 1)) ${#targets[@]} "$name" "$pkg"
	sed 's/^/    /' "$log"
	return 1
}

failed=0
for ((i = 0; i < ${#targets[@]}; i++)); do
	if [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; then
		wait -n || failed=1
	fi
	run "$i" &
	pids+=($!)
done
for pid in "${pids[@]}"; do
	wait "$pid" || failed=1
done
pids=()

if [ "$failed" -ne 0 ]; then
	echo "fuzz: FAILED in ${SECONDS}s"
	exit 1
fi
for pkg in "${!made[@]}"; do
	mkdir -p "$cache/$pkg"
	echo "${made[$pkg]}" >"$(fuzzed "$pkg")"
done
echo "fuzz: ok, ${#targets[@]} targets in ${SECONDS}s"
