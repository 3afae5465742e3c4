// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io/fs"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"

	"github.com/smcr-io/kube-smcr/config/crd"
)

func TestReferenceIsUpToDate(t *testing.T) {
	want, err := generate("../../api/v1alpha1")
	if err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile("../../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), string(got)); d != "" {
		t.Errorf("docs/api.md is not that of api/v1alpha1; run go generate ./api/... (-want +got):\n%s", d)
	}
}

// Each field that the API server knows is in the reference, and has a meaning.
func TestReferenceHasEveryField(t *testing.T) {
	text, err := os.ReadFile("../../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	files := crd.Files()
	names, err := fs.Glob(files, "*.yaml")
	if err != nil || len(names) == 0 {
		t.Fatalf("no definitions: %v", err)
	}
	seen := 0
	for _, name := range names {
		data, err := files.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		var def apiextensionsv1.CustomResourceDefinition
		if err := yaml.Unmarshal(data, &def); err != nil {
			t.Fatal(err)
		}
		var walk func(path string, p *apiextensionsv1.JSONSchemaProps)
		walk = func(path string, p *apiextensionsv1.JSONSchemaProps) {
			for field := range p.Properties {
				if path == "" && (field == "apiVersion" || field == "kind" || field == "metadata") {
					continue
				}
				seen++
				inner := p.Properties[field]
				if !strings.Contains(string(text), "| `"+field+"` |") {
					t.Errorf("%s: %s.%s is not in docs/api.md", name, path, field)
				}
				if inner.Description == "" {
					t.Errorf("%s: %s.%s has no description", name, path, field)
				}
				if field != "conditions" {
					walk(path+"."+field, &inner)
				}
			}
			if p.Items != nil && p.Items.Schema != nil {
				walk(path+"[]", p.Items.Schema)
			}
		}
		walk("", def.Spec.Versions[0].Schema.OpenAPIV3Schema)
	}
	if seen < 50 {
		t.Errorf("only %d fields in the definitions: this test looks at the wrong place", seen)
	}
}

// TestColumns_documented: where the manual tells of a column of an object that only -o wide shows, it says so, and of
// no other one.
func TestColumns_documented(t *testing.T) {
	text, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"smcrnodes", "smcrlinks"} {
		_, table, found := strings.Cut(string(text), "| `"+name+"` | meaning |\n")
		table, _, _ = strings.Cut(table, "\n\n")
		data, err := crd.Files().ReadFile("smcr.io_" + name + ".yaml")
		if err != nil || !found {
			t.Fatalf("the manual has a table of %s: %v; definition: %v", name, found, err)
		}
		var def apiextensionsv1.CustomResourceDefinition
		if err := yaml.Unmarshal(data, &def); err != nil {
			t.Fatal(err)
		}
		for _, c := range def.Spec.Versions[0].AdditionalPrinterColumns {
			for row := range strings.Lines(table) {
				head, _, _ := strings.Cut(strings.TrimPrefix(row, "| "), " | ")
				if !strings.Contains(head, "`"+strings.ToUpper(c.Name)+"`") {
					continue
				}
				if wide := strings.Contains(head, "-o wide"); wide != (c.Priority > 0) {
					t.Errorf("%s: column %s has priority %d, and the manual says that it needs -o wide: %v", name, c.Name, c.Priority, wide)
				}
			}
		}
	}
}
