//go:build !race

package local

import "testing"

// A question to a client that decides in this process takes no memory.
func TestNoAllocations(t *testing.T) {
	c := open(t)
	login := c.Policy("login")
	ask := func() {
		if _, err := login.Allow(t.Context(), "alice"); err != nil {
			t.Fatal(err)
		}
	}
	for range 10 {
		ask() // past the limit, too
	}
	if n := testing.AllocsPerRun(1000, ask); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
