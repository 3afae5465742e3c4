// SPDX-License-Identifier: Apache-2.0

package product

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/smcr-io/kube-smcr/test/cluster/lab/image"
)

// Traffic is the name of the image with the command traffic, the tests' own
// application.
const Traffic = "kube-smcr.local/traffic:1"

// TagNext is a tag of the image that is installed first, for something to
// upgrade to: see [Product.TagNext].
const TagNext = "next"

const module = "github.com/smcr-io/kube-smcr"

// Images are what the nodes need.
type Images struct {
	// Archives are the files to load.
	Archives []string
	// Chart is the directory of the chart.
	Chart string

	bin string // has kubectl-smcr
}

// Build builds the programs of this checkout and packs the images of these names, by default all,
// and [Traffic] into dir.
func Build(ctx context.Context, dir string, refs ...string) (*Images, error) {
	root, err := checkout(ctx)
	if err != nil {
		return nil, err
	}
	archives, err := image.Build(ctx, dir, refs...)
	if err != nil {
		return nil, err
	}
	traffic := filepath.Join(dir, "bin", "traffic")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", traffic, module+"/test/cluster/traffic")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build traffic: %w\n%s", err, out)
	}
	archive := filepath.Join(dir, "traffic.tar")
	err = image.Write(archive, image.Image{
		Ref: Traffic, User: "65534:65534", Entrypoint: []string{"/usr/bin/traffic"},
		Files: []image.File{{Name: "usr/bin/traffic", Source: traffic}},
	})
	if err != nil {
		return nil, err
	}
	return &Images{
		Archives: append(archives, archive),
		Chart:    filepath.Join(root, "charts", "kube-smcr"),
		bin:      filepath.Join(dir, "bin"),
	}, nil
}

// checkout is the directory of the module.
func checkout(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", module).Output()
	if err != nil {
		return "", fmt.Errorf("find the checkout of %s: %w", module, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// TagNext gives the image a second tag on all nodes, which are those of the cluster itself.
func (p *Product) TagNext(ctx context.Context) error {
	for _, n := range p.Lab.Nodes {
		if err := TagNextOn(ctx, n); err != nil {
			return err
		}
	}
	return nil
}

// TagNextOn is TagNext on one node, of whatever kind.
func TagNextOn(ctx context.Context, n interface {
	Run(ctx context.Context, command ...string) (string, error)
},
) error {
	_, err := n.Run(ctx, "ctr", "-n", "k8s.io", "images", "tag", "--force", image.Product, image.ProductRepository+":"+TagNext)
	return err
}
