// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"net"
	"slices"
	"strconv"
	"strings"
)

// aliasMark is the beginning of an alias that this package wrote, with its version.
const aliasMark = "kube-smcr/1"

// alias is the text that the interface gets as its alias, for when the journal is lost:
// its owner and its original state, as words of a letter, "=", and a value. The settings
// that the PF has made for a VF are not in it: a pod can write the alias, and could ask
// for other settings that way.
func (w *Wiring) alias() string {
	o := &w.Original
	words := []string{
		aliasMark, "d=" + w.Device.ID, "c=" + w.Owner.ContainerID, "i=" + w.Owner.IfName, "o=" + string(w.Mode),
		"n=" + o.Name, "m=" + strconv.Itoa(o.MTU), "a=" + o.MAC, "u=" + bit(o.Up),
	}
	if w.IfName != w.Owner.IfName {
		words = append(words, "l="+w.IfName)
	}
	if len(o.RDMA) > 0 && w.Device.SoftRDMA != "" {
		words = append(words, "r="+strings.Join(append([]string{w.Device.SoftRDMA}, o.RDMA...), ","))
	}
	if w.Owner.NetNS != "" && !strings.Contains(w.Owner.NetNS, " ") {
		words = append(words, "k="+strconv.FormatUint(w.Owner.NetNSID, 10), "p="+w.Owner.NetNS)
	}
	s := words[0]
	for _, word := range words[1:] {
		if len(s)+1+len(word) > maxAliasBytes {
			break // the last words are the least important ones
		}
		s += " " + word
	}
	return s
}

func bit(b bool) string {
	if b {
		return "1"
	}
	return "0"
}

// parseAlias reads an alias that this package wrote. It checks every value: a program in
// a pod may have written the alias.
func parseAlias(s string) (Wiring, bool) {
	words := strings.Split(s, " ")
	if words[0] != aliasMark || len(s) > maxAliasBytes {
		return Wiring{}, false
	}
	w := Wiring{Device: Device{VF: -1}}
	for _, word := range words[1:] {
		key, value, ok := strings.Cut(word, "=")
		if !ok {
			return Wiring{}, false
		}
		w.setWord(key, value)
	}
	return w, w.isValidAlias()
}

// setWord takes over one word of an alias, unchecked.
func (w *Wiring) setWord(key, value string) {
	o := &w.Original
	switch key {
	case "d":
		w.Device.ID = value
	case "c":
		w.Owner.ContainerID = value
	case "i":
		w.IfName, w.Owner.IfName = value, value // "l" comes later
	case "l":
		w.IfName = value
	case "o":
		w.Mode = Mode(value)
	case "n":
		o.Name = value
	case "m":
		o.MTU, _ = strconv.Atoi(value) // after an error 0, which isValidAlias refuses
	case "a":
		o.MAC = value
	case "u":
		o.Up = value == "1"
	case "r":
		names := strings.Split(value, ",")
		w.Device.SoftRDMA, o.RDMA = names[0], names[1:]
		w.Device.RDMA = o.RDMA
	case "k":
		w.Owner.NetNSID, _ = strconv.ParseUint(value, 10, 64) // 0 is no namespace
	case "p":
		w.Owner.NetNS = value
	}
}

// isValidAlias tells whether all values of an alias are such as this package writes.
func (w *Wiring) isValidAlias() bool {
	o := &w.Original
	soft := w.Device.SoftRDMA == kindRXE || w.Device.SoftRDMA == kindSIW
	_, err := net.ParseMAC(o.MAC)
	switch {
	case checkID(w.Device.ID) != nil, w.Owner.ContainerID == "", !validName(w.IfName), !validName(o.Name):
		return false
	case o.MTU < minMTU, o.MTU > maxMTU, err != nil, w.Mode != ModeMove && w.Mode != ModeIPVlan:
		return false
	case len(o.RDMA) > maxRDMA, len(o.RDMA) > 0 && !soft:
		return false
	}
	return !slices.ContainsFunc(o.RDMA, func(name string) bool { return !validRDMAName(name) })
}

func validRDMAName(s string) bool {
	return s != "" && len(s) <= maxRDMANameBytes && !strings.ContainsAny(s, "/ \t\r\n%")
}
