// SPDX-License-Identifier: Apache-2.0

// Package claims keeps on disk which devices the pods of a node have through
// ResourceClaims.
//
//	s := claims.NewStore(dataDir)
//	err := s.Write(claims.Claim{UID: uid, Pods: pods, Devices: devices})
//	devices, err := s.OfPod(podUID)
//
// There is one file for each ResourceClaim that is prepared. The DRA driver (package dra)
// writes the file before kubelet makes the pod's sandbox, and removes it when the pod has
// ended. The CNI plugin reads it to know which devices to move into the pod, and the agent
// to know which devices the pod's link groups use. Both can do that while the driver, or
// the agent that it is part of, is away: the files have all state.
//
// # Limitations
//
// A claim that several pods share is prepared once, for the pods that it is reserved for at
// that time. The file does not have pods that the claim is reserved for later.
package claims
