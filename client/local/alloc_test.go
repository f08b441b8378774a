//go:build !race

package local

import (
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// A question to a client that decides in this process takes no memory.
func TestNoAllocations(t *testing.T) {
	c := open(t)
	login := c.Policy("login")
	ask := func() {
		_, err := login.Allow(t.Context(), "alice")
		must.NoError(t, err)
	}
	for range 10 {
		ask() // past the limit, too
	}
	n := testing.AllocsPerRun(1000, ask)
	expect.True(t, n <= 0, "%v allocations", n)
}
