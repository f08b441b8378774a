// Package local decides in this process, with the interface of package client: for tests, and for programs that are a single
// process.
//
// It does not promise that counters outlive the Client or are shared with another one.
package local

import (
	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/ring"
)

// New returns a Client that decides by the same rules as a node with those policies. Nil stands for no policies; limits can be
// sent along (Client.Inline) either way. Its counters live and die with it. Close it when done.
func New(policies *policy.Set) *client.Client {
	// With a hash key of its own, nobody can choose keys that all lie in one place of a table.
	l := limiter.New(limiter.Config{Policies: policies, HashKey: ring.RandomHashKey()})
	return client.New(l, l.Close)
}
