//go:build race

package model

// underRace is set where everything takes ten times as long.
const underRace = true
