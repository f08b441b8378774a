// Package ingress bounds what callers can hold of a node before they have been authenticated, and for how long.
//
// It does not authenticate: its users do, and say so. It does not bound what an authenticated caller holds, beyond the number of
// connections, and does not protect from a flood that fills the network or the processor.
package ingress
