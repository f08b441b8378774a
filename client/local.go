package client

import (
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
)

// Local returns a Client that decides in this process, by the same rules as a node with those policies, for tests and for
// programs that are a single process. Nil stands for no policies; limits can be sent along (Client.Inline) either way.
// Its counters live and die with it. Close it when done.
func Local(policies *policy.Set) *Client {
	l := limiter.New(limiter.Config{Policies: policies})
	return newLocal(l, l.Close)
}
