// Package local makes a client.Client that decides in this process: for tests, and for programs that are a single
// process.
//
// Its counters end with the Client, and are shared with no other Client.
package local

import (
	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/ring"
)

// New returns a Client that decides by the same rules as a node with these policies. Nil: no policies. Limits can be
// sent along (Client.Inline) in both cases. Close the Client when done.
func New(policies *policy.Set) *client.Client {
	// A random hash key keeps callers from choosing keys that all fall into one place of a table.
	l := limiter.New(limiter.Config{Policies: policies, HashKey: ring.RandomHashKey()})
	return client.New(l, l.Close)
}
