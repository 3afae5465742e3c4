// SPDX-License-Identifier: Apache-2.0

// Command driver calls CNI plugins in a guest as a container runtime does, by
// libcni, and prints what came of it as JSON of package report.
//
//	driver call -conf /host/net.conflist -container a -device 0000:01:10.0 add
//	driver churn -conf /host/net.conflist -devices 0000:01:10.0,0000:01:10.2 -pods 100
//	driver crash -conf /host/net.conflist -devices 0000:01:10.0,0000:01:10.2 -command add -recover gc
//	driver dhcpd -if pf0 -server 10.9.0.1 -lease 10.9.0.7/24
//	driver host
//
// call makes one call. The pod's network namespace is /run/netns/CONTAINER unless
// -netns says otherwise, and is there. The device goes to the plugins as Multus
// gives it to them, as the capability deviceID.
//
// churn is many pods, each with a namespace of its own, and as many at a time as
// -parallel says. They take the devices in turns.
//
// crash kills the plugin after its first step, after its second in another pod, and
// so on, brings the machine back by one of what -recover says, compares, and goes
// on with as many further steps, until the plugin has no more. There are as many
// pods at a time as -devices. The plugin is one built with tag smcrcrash.
//
// dhcpd answers DHCP clients on one interface until it is killed, all of them with the
// same address, and prints what each asked for.
//
// host prints the state of the machine that plugins change.
package main
