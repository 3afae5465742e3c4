// SPDX-License-Identifier: Apache-2.0

package siw

import "fmt"

// rping sends, reads, and writes each message, and its client compares them.
func rping(n, size int) *tool {
	options := []string{"-C", fmt.Sprint(n), "-S", fmt.Sprint(size)}
	return &tool{
		name: "rping", server: append([]string{"rping", "-s"}, options...), client: append([]string{"rping", "-c", "-V"}, options...),
		port: "-p", to: "-a",
	}
}

// perftest is one of the programs that measure.
func perftest(name string, n, size int) *tool {
	command := []string{name, "-d", "siw0", "-R", "-F", "-n", fmt.Sprint(n), "-s", fmt.Sprint(size)}
	if name == "ib_read_bw" {
		command = append(command, "-o", "1")
	}
	return &tool{name: name, server: command, client: command, port: "-p"}
}
