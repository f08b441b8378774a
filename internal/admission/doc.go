// Package admission bounds what callers can hold of a node: connections (Listener), what they send and for how long
// before they have been authenticated (Conn, Frames, Calls), the buffers of gRPC's connections (Buffers), and memory,
// which a Budget divides among the parts of a node.
//
// The package does not authenticate: the front ends do, and call Conn.Authenticated. It does not protect from a flood
// that fills the network or the processor. It does not follow a memory limit that changes while the process runs.
package admission
