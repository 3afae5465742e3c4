// SPDX-License-Identifier: Apache-2.0

package kernelpath

// maxRules bounds the rules of a kind: MAX_RULES of bpf/kernelpath.bpf.c. Kubelet runs 110
// pods unless told otherwise, and nobody more than 1,000.
const maxRules = 4096
