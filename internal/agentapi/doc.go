// SPDX-License-Identifier: Apache-2.0

// Package agentapi is the JSON API of the node agent: the paths, the
// documents, the reason codes with their texts, and a client.
//
// The API is HTTP on a Unix socket of mode 0600; the agent also checks that
// the peer is root or its own user. Every document has a field apiVersion.
// Within a version fields are added and never renamed or removed, so a reader
// ignores what it does not know.
//
//	GET  /v1/status                  Status
//	GET  /v1/links                   Links: link groups and their links
//	GET  /v1/conns                   Conns: connections that the agent carries
//	GET  /v1/explain?src=&dst=       Explanation
//	GET  /v1/attachments             Attachments: pods and what was done there
//	GET  /v1/devices                 Devices: those that pods can have for themselves
//	POST /v1/attachments/sync        read the records now; 204
//	POST /v1/handover?instance=      give the node to the agent that asks; 204
//	GET  /metrics                    Prometheus text
//
// Errors are a Problem with the HTTP status.
package agentapi
