//go:build race

package simulation

const raceEnabled = true // it makes everything ten times slower
