// SPDX-License-Identifier: Apache-2.0

// Package agentapi is the JSON API of the node agent: the paths, the
// documents, the reason codes with their texts, and a client.
//
// The API is HTTP on a Unix socket of mode 0600; the agent also checks that
// the peer is root or its own user. Every document has a field apiVersion.
// Within a version, fields may be added, but are never renamed or removed, so a reader
// must ignore fields that it does not know.
//
//	GET  /v1/status                  Status
//	GET  /v1/links                   Links: link groups and their links
//	GET  /v1/conns?pod=              Conns: connections that the agent carries, or pods' kernels; of one pod, or of all
//	GET  /v1/explain?src=&dst=       Explanation
//	GET  /v1/attachments             Attachments: pods, and what the agent did for them
//	GET  /v1/devices                 Devices: those that pods can have for themselves, or share
//	POST /v1/attachments/sync        read the attachment records now; 204
//	POST /v1/handover?instance=      hand the node over to the agent that asks; 204
//	GET  /metrics                    Prometheus text
//
// An error is answered with its HTTP status and a Problem.
package agentapi
