// SPDX-License-Identifier: Apache-2.0

// Command apidoc writes docs/api.md, the reference of the Kubernetes objects,
// from the types in api/v1alpha1: their comments, and the markers that the
// definitions are generated from.
//
//	go generate ./api/...         (or go run ./tools/apidoc from the root)
//
// A test fails when the file is not that of the types.
package main

import (
	"flag"
	"fmt"
	"os"
)

func main() {
	types := flag.String("types", "api/v1alpha1", "`DIRECTORY` of the types")
	out := flag.String("o", "docs/api.md", "`FILE` that is written")
	flag.Parse()
	text, err := generate(*types)
	if err == nil {
		err = os.WriteFile(*out, text, 0o644)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "apidoc:", err)
		os.Exit(1)
	}
}
