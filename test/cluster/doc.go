// Package clustertest tests Weir as its users run it: real binaries, real sockets, processes that come and go.
//
// It holds nothing but tests. They build the binary once, with the race detector when they have it themselves, start
// nodes on free ports of the loopback address, wait for conditions with a deadline, never for a time, and show what the
// processes wrote only when a test fails.
package clustertest
