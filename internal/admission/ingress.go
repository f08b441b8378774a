// Package admission bounds what callers can hold of a node: connections, bytes and calls before they have been authenticated and for how
// long, the buffers of gRPC's connections, and the memory of the node, which it divides among the node's parts.
//
// It does not authenticate: its users do, and say so. It does not protect from a flood that fills the network or the processor, and does
// not follow a memory limit that changes while the process runs.
package admission
