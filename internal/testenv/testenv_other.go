// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package testenv

import "errors"

var errNotLinux = errors.New("this is not Linux")

func checkBPF() error { return errNotLinux }

func checkNftables() error { return errNotLinux }
