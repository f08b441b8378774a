//go:build !race

package algo

const underRace = false
