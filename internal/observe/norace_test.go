//go:build !race

package observe

const underRace = false
