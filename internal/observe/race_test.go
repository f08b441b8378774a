//go:build race

package observe

// underRace is set where memory is not what it is.
const underRace = true
