// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
)

// A Kind says what a message is.
type Kind uint8

const (
	// Hello begins the talk, in both directions.
	Hello Kind = iota + 1
	// Start asks for a [Command].
	Start
	// Started says, in an [Answer], which process it is.
	Started
	// Stdin is input for the command.
	Stdin
	// StdinTaken says that the command has taken the last input, or that nobody
	// takes it any more.
	StdinTaken
	// StdinEnd ends the input of the command.
	StdinEnd
	// Stdout is what the command printed.
	Stdout
	// Stderr is what the command printed to its standard error.
	Stderr
	// Signal asks for the signal in its one byte of payload, to the process.
	Signal
	// Kill asks for SIGKILL to the process and all of its group.
	Kill
	// Exit says in an [Answer] how the command ended. It is the stream's last.
	Exit
	// Ping asks whether the guest is alive.
	Ping
	// Pong says so.
	Pong
)

const (
	// MaxPayload is the most that one message carries: a few reads of a pipe, and
	// little enough that commands take turns.
	MaxPayload = 32 << 10

	// NonceBytes is what follows a Hello.
	NonceBytes = 16

	// Ports is how many programs of the host may talk to a guest at a time.
	Ports = 4

	headerBytes = 12
	magic       = 0x534d4352 // "SMCR"
)

// PortName is the name of a port, from 0, as virtio tells it to the guest.
func PortName(n int) string { return fmt.Sprintf("kube-smcr.%d", n) }

// A Message is one message.
type Message struct {
	Kind    Kind
	Stream  uint32
	Payload []byte
}

// A Command is what Start asks for.
type Command struct {
	Args []string `json:"args"`
	Env  []string `json:"env,omitempty"` // besides the guest's own
	Dir  string   `json:"dir,omitempty"`
}

// An Answer is what Started and Exit say.
type Answer struct {
	PID    int    `json:"pid,omitempty"`
	Code   int    `json:"code,omitempty"`
	Signal int    `json:"signal,omitempty"` // that ended it
	Error  string `json:"error,omitempty"`  // why it was not started
}

// Append appends a message to b.
//
//	 0      4      5        8        12
//	+------+------+--------+--------+---------
//	| magic| kind | length | stream | payload
//	+------+------+--------+--------+---------
func (m Message) Append(b []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, magic)
	b = binary.BigEndian.AppendUint32(b, uint32(m.Kind)<<24|uint32(len(m.Payload)))
	b = binary.BigEndian.AppendUint32(b, m.Stream)
	return append(b, m.Payload...)
}

// Read reads the next message.
func Read(r io.Reader) (Message, error) {
	var head [headerBytes]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return Message{}, err
	}
	if got := binary.BigEndian.Uint32(head[:]); got != magic {
		return Message{}, fmt.Errorf("read a message: it begins with %#x, not %#x", got, uint32(magic))
	}
	word := binary.BigEndian.Uint32(head[4:])
	m := Message{Kind: Kind(word >> 24), Stream: binary.BigEndian.Uint32(head[8:])}
	size := word & 0xffffff
	if size > MaxPayload {
		return Message{}, fmt.Errorf("read a message: payload of %d bytes, the most is %d", size, MaxPayload)
	}
	m.Payload = make([]byte, size)
	if _, err := io.ReadFull(r, m.Payload); err != nil {
		return Message{}, fmt.Errorf("read a message: %w", err)
	}
	return m, nil
}

// AwaitHello reads until the Hello with that nonce and forgets what is before
// it.
func AwaitHello(r io.ByteReader, nonce []byte) error {
	want := Message{Kind: Hello, Payload: nonce}.Append(nil)
	seen := make([]byte, 0, len(want))
	for !bytes.Equal(seen, want) {
		b, err := r.ReadByte()
		if err != nil {
			return fmt.Errorf("wait for the guest's greeting: %w", err)
		}
		if len(seen) == cap(seen) {
			seen = append(seen[:0], seen[1:]...)
		}
		seen = append(seen, b)
	}
	return nil
}
