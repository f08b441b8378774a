//go:build race

package store

// underRace is set where memory is not what it is.
const underRace = true
