// SPDX-License-Identifier: Apache-2.0

package script

import (
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"time"
)

// Spec is a script with its parameters.
type Spec struct {
	Name string
	// Size is the size of one message, write or read.
	Size int
	// Count is the number of messages.
	Count int
	// Bytes is the size of a stream.
	Bytes int64
	// Every is the time between messages, and For how long messages are sent
	// instead of Count.
	Every, For time.Duration
	// Pause is how long a slow reader waits before it begins.
	Pause time.Duration
	// Seed makes the bytes of one connection differ from another's.
	Seed uint64
	// Enough ends For before its time when it is closed; nil: it does not. It is
	// for the client's end only, and no part of what the server is told.
	Enough <-chan struct{}
}

// Limits of parameters: they come from the other end.
const (
	maxSize     = 1 << 20
	maxCount    = 1 << 24
	maxDuration = time.Hour
	// maxSpec bounds the first message; the longest spec has 150 bytes.
	maxSpec = 512
)

// Parse reads NAME[:KEY=VALUE]..., with the keys size, count, bytes, every,
// for, pause and seed. Numbers may end in K, M or G.
func Parse(text string) (Spec, error) {
	words := strings.Split(text, ":")
	s := Spec{Name: words[0]}
	d, ok := find(s.Name)
	if !ok {
		return s, fmt.Errorf("script %q: want one of %s", s.Name, strings.Join(Names(), " "))
	}
	s.Size, s.Count, s.Bytes, s.Every, s.For, s.Pause = d.defaults.Size, d.defaults.Count, d.defaults.Bytes, d.defaults.Every, d.defaults.For, d.defaults.Pause
	for _, w := range words[1:] {
		if err := s.set(w); err != nil {
			return s, fmt.Errorf("script %s: %w", text, err)
		}
	}
	return s, nil
}

func (s *Spec) set(word string) error {
	key, value, ok := strings.Cut(word, "=")
	if !ok {
		return fmt.Errorf("%q is not KEY=VALUE", word)
	}
	var err error
	switch key {
	case "size":
		err = number(&s.Size, value, 1, maxSize)
	case "count":
		err = number(&s.Count, value, 0, maxCount)
	case "bytes":
		err = number(&s.Bytes, value, 0, math.MaxInt64)
	case "seed":
		s.Seed, err = strconv.ParseUint(value, 10, 64)
	case "every":
		err = duration(&s.Every, value)
	case "for":
		err = duration(&s.For, value)
	case "pause":
		err = duration(&s.Pause, value)
	default:
		return fmt.Errorf("unknown parameter %q", key)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	return nil
}

func number[T int | int64](to *T, text string, least, most T) error {
	unit := int64(1)
	switch {
	case strings.HasSuffix(text, "K"):
		unit = 1 << 10
	case strings.HasSuffix(text, "M"):
		unit = 1 << 20
	case strings.HasSuffix(text, "G"):
		unit = 1 << 30
	}
	if unit > 1 {
		text = text[:len(text)-1]
	}
	n, err := strconv.ParseInt(text, 10, 64)
	switch {
	case err != nil:
		return err
	case n < 0 || n > int64(most)/unit || T(n*unit) < least:
		return fmt.Errorf("%s is not in %d to %d", text, least, most)
	}
	*to = T(n * unit)
	return nil
}

func duration(to *time.Duration, text string) error {
	d, err := time.ParseDuration(text)
	switch {
	case err != nil:
		return err
	case d < 0 || d > maxDuration:
		return fmt.Errorf("%v is not in 0 to %v", d, maxDuration)
	}
	*to = d
	return nil
}

// String is what Parse reads: what differs from the script's defaults, and the
// seed.
func (s Spec) String() string {
	d, _ := find(s.Name)
	var b strings.Builder
	b.WriteString(s.Name)
	for _, p := range [...]struct {
		key          string
		value, usual any
	}{
		{"size", s.Size, d.defaults.Size},
		{"count", s.Count, d.defaults.Count},
		{"bytes", s.Bytes, d.defaults.Bytes},
		{"every", s.Every, d.defaults.Every},
		{"for", s.For, d.defaults.For},
		{"pause", s.Pause, d.defaults.Pause},
	} {
		if p.value != p.usual {
			fmt.Fprintf(&b, ":%s=%v", p.key, p.value)
		}
	}
	fmt.Fprintf(&b, ":seed=%d", s.Seed)
	return b.String()
}

// The first message is a mark, the length of the spec and the spec.
const helloMark = "kpr"

func (s Spec) hello() []byte {
	text := s.String()
	b := append([]byte(helloMark), byte(len(text)>>8), byte(len(text)))
	return append(b, text...)
}

func readHello(r io.Reader) (Spec, int, error) {
	head := make([]byte, len(helloMark)+2)
	if _, err := io.ReadFull(r, head); err != nil {
		return Spec{}, 0, fmt.Errorf("wait for the script: %w", err)
	}
	n := int(head[len(helloMark)])<<8 | int(head[len(helloMark)+1])
	if string(head[:len(helloMark)]) != helloMark || n > maxSpec {
		return Spec{}, 0, fmt.Errorf("wait for the script: %w: % x", errNoHello, head)
	}
	text := make([]byte, n)
	if _, err := io.ReadFull(r, text); err != nil {
		return Spec{}, 0, fmt.Errorf("read the script: %w", err)
	}
	s, err := Parse(string(text))
	return s, len(head) + n, err
}

var errNoHello = errors.New("this is not how a peer begins")
