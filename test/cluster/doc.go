// Package clustertest tests Weir as its users run it: real binaries, real sockets, processes that come and go.
//
// It holds nothing but tests. They build the binary once, with the race detector when they have it themselves, start
// nodes on free ports of the loopback address, wait for conditions with a deadline, never for a time, and show what the
// processes wrote only when a test fails.
//
// What counters survive (survive_test.go) is tested under load: a cluster is asked all the time about keys that are at
// their limits, under policies of every durability and consistency side by side, while its nodes come, leave, crash,
// stand still or are cut off from one another; package checker judges what was answered. The tests that cut the network
// give every node a network namespace of its own, for which they need root, and are skipped otherwise.
package clustertest
