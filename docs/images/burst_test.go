package main

import (
	"os"
	"testing"
)

// TestBurst: the picture of the repository is the one that burst draws.
func TestBurst(t *testing.T) {
	t.Chdir("../..")
	got, err := burst()
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("docs/images/burst.svg")
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != string(want) {
		t.Error("docs/images/burst.svg is out of date: go run ./docs/images")
	}
}
