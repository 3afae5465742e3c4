// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/smcr-io/kube-smcr/config/crd"
)

// ApplyCRDs applies the CustomResourceDefinitions that are embedded in this program, and
// waits until the API server serves all of them or ctx ends. Objects that exist stay. The
// chart calls it before each installation and upgrade.
func ApplyCRDs(ctx context.Context, api *rest.Config, log *slog.Logger) error {
	scheme := runtime.NewScheme()
	if err := apiextensionsv1.AddToScheme(scheme); err != nil {
		return fmt.Errorf("register the API's types: %w", err)
	}
	c, err := client.New(api, client.Options{Scheme: scheme})
	if err != nil {
		return fmt.Errorf("connect to the API server: %w", err)
	}
	files := crd.Files()
	names, err := fs.Glob(files, "*.yaml")
	if err != nil {
		return fmt.Errorf("list the CRDs: %w", err)
	}
	var applied []string
	for _, name := range names {
		data, err := files.ReadFile(name)
		if err != nil {
			return fmt.Errorf("read %s: %w", name, err)
		}
		u := &unstructured.Unstructured{}
		if err := yaml.Unmarshal(data, &u.Object); err != nil {
			return fmt.Errorf("parse %s: %w", name, err)
		}
		err = retry(ctx, log, func() error {
			return c.Apply(ctx, client.ApplyConfigurationFromUnstructured(u.DeepCopy()), client.FieldOwner("kube-smcr-crds"), client.ForceOwnership)
		})
		if err != nil {
			return fmt.Errorf("apply the definition %s: %w", u.GetName(), err)
		}
		applied = append(applied, u.GetName())
		log.Info("CRD applied", "crd", u.GetName())
	}
	for _, name := range applied {
		err := retry(ctx, log, func() error { return established(ctx, c, name) })
		if err != nil {
			return fmt.Errorf("wait for the definition %s: %w", name, err)
		}
	}
	return nil
}

func established(ctx context.Context, c client.Client, name string) error {
	var def apiextensionsv1.CustomResourceDefinition
	if err := c.Get(ctx, client.ObjectKey{Name: name}, &def); err != nil {
		return err
	}
	why := "no status yet"
	for _, cond := range def.Status.Conditions {
		switch {
		case cond.Type == apiextensionsv1.Established && cond.Status == apiextensionsv1.ConditionTrue:
			return nil
		case cond.Type == apiextensionsv1.NamesAccepted && cond.Status == apiextensionsv1.ConditionFalse:
			why = cond.Message
		}
	}
	return fmt.Errorf("not established: %s", why)
}

// retry calls f until it succeeds or ctx ends. The API server may be away for a moment,
// and a Helm hook that fails ends the installation.
func retry(ctx context.Context, log *slog.Logger, f func() error) error {
	for {
		err := f()
		if err == nil || permanent(err) {
			return err
		}
		log.Info("failed; tried again", "err", err)
		select {
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-time.After(coalesce):
		}
	}
}
