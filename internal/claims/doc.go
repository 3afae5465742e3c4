// SPDX-License-Identifier: Apache-2.0

// Package claims keeps on disk which devices the pods of a node claimed.
//
//	s := claims.NewStore(dataDir)
//	err := s.Write(claims.Claim{UID: uid, Pods: pods, Devices: devices})
//	devices, err := s.OfPod(podUID)
//
// There is one file for each ResourceClaim that is prepared. The DRA driver
// (package dra) writes it before kubelet makes the pod's sandbox, and removes it
// when the pod is over. The CNI plugin reads it to know which devices to move
// into the pod, and the agent to know which the pod's link groups run on. Both
// work while the driver, or the agent that it is part of, is away: nothing is
// held in memory.
//
// # Limitations
//
// A claim that several pods share is prepared once, for those that it was
// reserved for then: the file does not name pods that come later.
package claims
