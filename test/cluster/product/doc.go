// SPDX-License-Identifier: Apache-2.0

// Package product installs kube-smcr on a cluster of package lab as its users
// do, by its Helm chart from an image with its programs, and asks it what users
// ask: for the end-to-end tests and the demo.
//
//	images, err := product.Build(ctx, dir)
//	c, err := lab.Up(ctx, lab.Config{Images: images.Archives})
//	p, err := product.New(c, images)
//	err = p.Install(ctx, image.ProductTag)
//	err = p.WaitReady(ctx)
//
// # Who owns what
//
// A Product belongs to the caller of New, and may be used by several goroutines.
// It holds nothing that ends: the cluster is the caller's, and removing it
// removes everything.
//
// # Limitations
//
// An upgrade is one to the same programs under another tag.
package product
