// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// LabelSelector selects objects by their labels, as selectors do elsewhere in
// Kubernetes. Empty, it selects all. It has a type of its own so that the API
// server can refuse what the controller could not use.
type LabelSelector struct {
	// matchLabels are labels that an object must have with exactly these values.
	// At most 32.
	// +optional
	// +kubebuilder:validation:MaxProperties=32
	// +kubebuilder:validation:XValidation:rule="self.all(k, !format.qualifiedName().validate(k).hasValue())",message="a key is no label: want a name such as app, or a domain and a name such as example.com/app, each part of letters, digits, '-', '_' and '.'"
	MatchLabels map[string]LabelValue `json:"matchLabels,omitempty"`
	// matchExpressions are further requirements. An object is selected if it meets
	// all of them, and matchLabels. At most 16.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	MatchExpressions []LabelRequirement `json:"matchExpressions,omitempty"`
}

// LabelValue is the value of a label.
//
// +kubebuilder:validation:MaxLength=63
// +kubebuilder:validation:XValidation:rule="!format.labelValue().validate(self).hasValue()",message="not the value of a label: want letters, digits, '-', '_' and '.', with a letter or digit at both ends"
type LabelValue string

// LabelRequirement is one requirement on a label of an object. With key app,
// operator In and values redis and nginx, for example, the object must have the label
// app with the value redis or nginx.
//
// +kubebuilder:validation:XValidation:rule="self.operator in ['In', 'NotIn'] ? has(self.values) && self.values.size() > 0 : !has(self.values) || self.values.size() == 0",message="operators In and NotIn need values; Exists and DoesNotExist must have none"
type LabelRequirement struct {
	// key is the name of the label, as app or example.com/app.
	// +required
	// +kubebuilder:validation:MaxLength=317
	// +kubebuilder:validation:XValidation:rule="!format.qualifiedName().validate(self).hasValue()",message="not a label: want a name such as app, or a domain and a name such as example.com/app, each part of letters, digits, '-', '_' and '.'"
	Key string `json:"key"`
	// operator is what the requirement says of the label. In: its value is one of
	// values. NotIn: its value is none of values, or the object does not have the
	// label. Exists: the object has the label. DoesNotExist: it does not.
	// +required
	// +kubebuilder:validation:Enum=In;NotIn;Exists;DoesNotExist
	Operator string `json:"operator"`
	// values are what In and NotIn compare the label's value with. At most 32.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	Values []LabelValue `json:"values,omitempty"`
}

// Selector returns what s selects. An error names a key or value that is no
// label; the API server does not look at these.
func (s LabelSelector) Selector() (labels.Selector, error) {
	ls := metav1.LabelSelector{}
	for k, v := range s.MatchLabels {
		metav1.AddLabelToSelector(&ls, k, string(v))
	}
	for _, r := range s.MatchExpressions {
		req := metav1.LabelSelectorRequirement{Key: r.Key, Operator: metav1.LabelSelectorOperator(r.Operator)}
		for _, v := range r.Values {
			req.Values = append(req.Values, string(v))
		}
		ls.MatchExpressions = append(ls.MatchExpressions, req)
	}
	sel, err := metav1.LabelSelectorAsSelector(&ls)
	if err != nil {
		return nil, fmt.Errorf("label selector: %w", err)
	}
	return sel, nil
}
