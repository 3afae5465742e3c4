// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
)

// Capture writes every frame of the segment to a file until stop is called, which
// returns the file. It costs the guests nothing. The file goes with the lab.
func (l *Lab) Capture(name string) (stop func() (pcap string, err error), err error) {
	if !namePattern.MatchString(name) {
		return nil, fmt.Errorf("capture %q: want lower case letters, digits and dashes", name)
	}
	dir := filepath.Join(l.dir, "captures")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	// Every port of a hub has every frame. That of guest 1, which is there without the
	// guest, too, also counts those of further guests.
	at := trunk(nicSegment, 1)
	file, id := filepath.Join(dir, name+".pcap"), "capture-"+name
	arguments := map[string]any{"qom-type": "filter-dump", "id": id, "netdev": at, "file": file}
	if err := l.guests[0].order(context.Background(), "object-add", arguments); err != nil {
		return nil, err
	}
	return func() (string, error) {
		return file, l.guests[0].order(context.Background(), "object-del", map[string]any{"id": id})
	}, nil
}
