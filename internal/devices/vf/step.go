// SPDX-License-Identifier: Apache-2.0

//go:build !smcrcrash

package vf

// Step is called after each change that an attachment makes to the machine. It does
// nothing here. In a program that is built with the tag smcrcrash, for tests, it ends the
// process.
func Step(string) {}
