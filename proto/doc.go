// Package proto holds the interface definitions: weir/v1 for callers, weir/peer/v1 between nodes, and the Go code
// generated from them. It promises compatibility for weir/v1 only; nodes that speak different numbers of the
// peer protocol reject each other.
package proto

//go:generate ./generate.sh
