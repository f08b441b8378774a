//go:build race

package tracing

// underRace is set where memory is not what it is.
const underRace = true
