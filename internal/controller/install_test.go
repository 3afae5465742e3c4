// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// TestRetry: what may pass is tried again once a second; a refusal for good, and the end of the context,
// end the tries.
func TestRetry(t *testing.T) {
	away := errors.New("connection refused")
	forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "customresourcedefinitions"}, "x", errors.New("no right"))
	for _, tt := range []struct {
		name    string
		answers []error // of the tries; the last one is repeated
		tries   int
		took    time.Duration
		want    []error
	}{
		{"at once", []error{nil}, 1, 0, nil},
		{"the API server is away for a moment", []error{away, away, nil}, 3, 2 * coalesce, nil},
		{"a right is missing", []error{forbidden}, 1, 0, []error{forbidden}},
		{"a right is missing later", []error{away, forbidden}, 2, coalesce, []error{forbidden}},
		{"the API server stays away", []error{away}, 5, 9 * coalesce / 2, []error{away, context.DeadlineExceeded}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 9*coalesce/2)
				defer cancel()
				began, tries := time.Now(), 0
				err := retry(ctx, slog.New(slog.DiscardHandler), func() error {
					tries++
					return tt.answers[min(tries, len(tt.answers))-1]
				})
				if took := time.Since(began); tries != tt.tries || took != tt.took {
					t.Errorf("%d tries in %v, want %d in %v", tries, took, tt.tries, tt.took)
				}
				if (err == nil) != (tt.want == nil) {
					t.Errorf("error %v", err)
				}
				for _, want := range tt.want {
					if !errors.Is(err, want) {
						t.Errorf("error %v is not %v", err, want)
					}
				}
			})
		})
	}
}

// definition is an API server that has one CustomResourceDefinition.
type definition struct {
	client.Client
	conditions []apiextensionsv1.CustomResourceDefinitionCondition
	err        error
}

func (d *definition) Get(_ context.Context, _ client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
	obj.(*apiextensionsv1.CustomResourceDefinition).Status.Conditions = d.conditions
	return d.err
}

// TestEstablished: a definition counts once the API server serves it; before, the error says what the
// API server has against it.
func TestEstablished(t *testing.T) {
	is := func(kind apiextensionsv1.CustomResourceDefinitionConditionType, status apiextensionsv1.ConditionStatus, message string) apiextensionsv1.CustomResourceDefinitionCondition {
		return apiextensionsv1.CustomResourceDefinitionCondition{Type: kind, Status: status, Message: message}
	}
	for _, tt := range []struct {
		name string
		has  definition
		want string // in the error; "": none
	}{
		{"new", definition{}, "not established: no status yet"},
		{"not served yet", definition{conditions: []apiextensionsv1.CustomResourceDefinitionCondition{
			is(apiextensionsv1.NamesAccepted, apiextensionsv1.ConditionTrue, "no conflicts found"), is(apiextensionsv1.Established, apiextensionsv1.ConditionFalse, "installing"),
		}}, "not established: no status yet"},
		{"another definition has the name", definition{conditions: []apiextensionsv1.CustomResourceDefinitionCondition{
			is(apiextensionsv1.NamesAccepted, apiextensionsv1.ConditionFalse, `"smcrlinks" is already in use`),
		}}, `not established: "smcrlinks" is already in use`},
		{"served", definition{conditions: []apiextensionsv1.CustomResourceDefinitionCondition{
			is(apiextensionsv1.NamesAccepted, apiextensionsv1.ConditionTrue, ""), is(apiextensionsv1.Established, apiextensionsv1.ConditionTrue, ""),
		}}, ""},
		{"not read", definition{err: errors.New("connection refused")}, "connection refused"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := established(t.Context(), &tt.has, "smcrlinks.smcr.io")
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want one with %q", err, tt.want)
			}
		})
	}
}
