// SPDX-License-Identifier: Apache-2.0

package linkgroup

// Check tests what must hold between any two steps.
func (g *Group) Check() error { return check(g) }

// HasOutputs reports whether the shell has something to take with Poll.
func (g *Group) HasOutputs() bool { return len(g.out.list) > 0 }
