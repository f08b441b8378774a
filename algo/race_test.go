//go:build race

package algo

// underRace is set where everything takes ten times as long and memory is not what it is.
const underRace = true
