// SPDX-License-Identifier: Apache-2.0

// The check command tells in two minutes whether what changed is fit to be
// committed: it builds everything, lints the packages that changed against the main
// branch, and runs their tests and those of the packages that import them.
//
//	make check                   (or go run ./tools/check from the root)
//	go run ./tools/check -list   only say which packages that are
//
// Changed is what differs from where this branch left main, committed or not. The
// tests run without the race detector and with -short, those of the changed packages
// first. Clusters, guests and the scale test are left to make test, and so are
// packages that import the changed ones only through others. What there is no time
// for is named.
package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

// budget is what a developer waits for, on two processors with warm caches.
const budget = 110 * time.Second

// longest is what the tests of a package may take if there is more time.
const longest = 10 * time.Minute

// endAfter is how long a command may take to end when it is told to.
const endAfter = 5 * time.Second

func main() {
	base := flag.String("base", "main", "the branch that this one is to be merged into")
	budget := flag.Duration("for", budget, "how long it may take")
	list := flag.Bool("list", false, "only say which packages are tested")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *base, *budget, *list)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "check:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, base string, budget time.Duration, list bool) error {
	began := time.Now()
	files, err := changedFiles(ctx, base)
	if err != nil {
		return err
	}
	all, err := packages(ctx)
	if err != nil {
		return err
	}
	todo := plan(files, all)
	fmt.Println(todo)
	if list {
		return nil
	}
	ctx, cancel := context.WithDeadline(ctx, began.Add(budget))
	defer cancel()
	if err := command(ctx, os.Environ(), os.Stdout, "go", "build", "./..."); err != nil {
		return fmt.Errorf("build: %w", err)
	}
	env, err := environment(ctx)
	if err != nil {
		return err
	}
	late, err := test(ctx, env, append([]string{"."}, todo.changed...))
	if len(late) > 0 {
		err = errors.Join(err, fmt.Errorf("no time for %s; -for gives more", strings.Join(late, " ")))
	}
	errs := []error{err}
	if dirs := append(slices.Clone(todo.changed), todo.apart...); len(dirs) > 0 {
		if err := lint(ctx, dirs); err != nil {
			errs = append(errs, fmt.Errorf("lint: %w", err))
		}
	}
	if len(todo.importers) > 0 && ctx.Err() == nil {
		late, err := test(ctx, env, todo.importers)
		if len(late) > 0 {
			fmt.Printf("check: no time for %s, which import what changed: make test PKG='%[1]s'\n", strings.Join(late, " "))
		}
		errs = append(errs, err)
	}
	fmt.Printf("check: %.0f s\n", time.Since(began).Seconds())
	return errors.Join(errs...)
}

// changedFiles returns the files that differ from where this branch left base, and new ones.
func changedFiles(ctx context.Context, base string) ([]string, error) {
	from, err := output(ctx, "git", "merge-base", "HEAD", base)
	if err != nil {
		if from, err = output(ctx, "git", "merge-base", "HEAD", "origin/"+base); err != nil {
			return nil, fmt.Errorf("find where this branch left %s (-base names another one): %w", base, err)
		}
	}
	differ, err := output(ctx, "git", "diff", "--name-only", "--no-renames", strings.TrimSpace(from))
	if err != nil {
		return nil, err
	}
	unknown, err := output(ctx, "git", "ls-files", "--others", "--exclude-standard")
	if err != nil {
		return nil, err
	}
	return strings.Split(strings.TrimSpace(differ+unknown), "\n"), nil
}

// packages returns the packages of the module, with what they import.
func packages(ctx context.Context) ([]pkg, error) {
	text, err := output(ctx, "go", "list", "-e", "-f", `{{.ImportPath}} {{join .Imports " "}} {{join .TestImports " "}} {{join .XTestImports " "}}`, "./...")
	if err != nil {
		return nil, err
	}
	var out []pkg
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		out = append(out, pkg{dir: local(words[0]), imports: words[1:]})
	}
	return out, nil
}

// lint lints packages. The linters follow the paths of cgo's output, which the build
// cache has from any checkout with -trimpath, also from one that is gone.
func lint(ctx context.Context, dirs []string) error {
	env := append(os.Environ(), "GOFLAGS="+strings.ReplaceAll(os.Getenv("GOFLAGS"), "-trimpath", ""))
	args := append([]string{"tool", "-modfile=tools/pinned/go.mod", "golangci-lint", "run"}, patterns(dirs)...)
	return command(ctx, env, os.Stdout, "go", args...)
}

// environment returns the environment of the tests. It names the inputs of programs that tests build and run, of which go test cannot know.
func environment(ctx context.Context) ([]string, error) {
	inputs, err := output(ctx, "go", "run", "./tools/inputs")
	if err != nil {
		return nil, err
	}
	return append(os.Environ(), strings.Fields(inputs)...), nil
}

// test tests packages, and returns those for which there was no time.
func test(ctx context.Context, env, dirs []string) (late []string, err error) {
	var text bytes.Buffer
	err = command(ctx, env, io.MultiWriter(os.Stdout, &text), "go", append([]string{"test", "-short", "-timeout=" + longest.String()}, patterns(dirs)...)...)
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return nil, err
	}
	passed, failed := results(&text)
	for _, dir := range dirs {
		if !slices.Contains(passed, dir) && !slices.Contains(failed, dir) {
			late = append(late, patterns([]string{dir})...)
		}
	}
	if len(failed) == 0 {
		return late, nil
	}
	return late, fmt.Errorf("tests of %s failed", strings.Join(failed, " "))
}

// results are the packages of which the output of go test tells the result.
func results(text io.Reader) (passed, failed []string) {
	for s := bufio.NewScanner(text); s.Scan(); {
		words := strings.Fields(s.Text())
		switch {
		case len(words) < 2:
		case words[0] == "ok", words[0] == "?":
			passed = append(passed, local(words[1]))
		case words[0] == "FAIL":
			failed = append(failed, local(words[1]))
		}
	}
	return passed, failed
}

func patterns(dirs []string) []string {
	out := make([]string, len(dirs))
	for i, dir := range dirs {
		out[i] = "./" + dir
		if dir == "." {
			out[i] = dir
		}
	}
	return out
}

// command runs a program with everything that it starts in a group of its own, which
// ends with ctx.
func command(ctx context.Context, env []string, out io.Writer, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = env, out, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = endAfter
	return cmd.Run()
}

func output(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return string(out), nil
}
