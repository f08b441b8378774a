//go:build !race

package clustertest

// raceEnabled says that the tests, and therefore the binary, are built with the race detector.
const raceEnabled = false
