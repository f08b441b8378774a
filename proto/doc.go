// Package proto holds the interface definitions: weir/v1 for callers, weir/peer/v1 between nodes, and the Go code
// generated from them. It promises compatibility for weir/v1 only; nodes of different versions agree on the peer
// protocol by the number in its Hello.
package proto

//go:generate ./generate.sh
