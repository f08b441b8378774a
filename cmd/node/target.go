package main

import (
	"errors"
	"fmt"

	"github.com/spf13/pflag"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/policy"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// targetFlags say what a command has decide: a policy, or a limit that it sends along.
type targetFlags struct {
	policy, limit, algorithm, namespace string
}

func (f *targetFlags) register(fs *pflag.FlagSet) {
	fs.StringVar(&f.policy, "policy", "", "policy to decide by")
	fs.StringVar(&f.limit, "limit", "", "limit to decide by in place of a policy, as 5/1m")
	fs.StringVar(&f.algorithm, "algorithm", "sliding_log", "algorithm of --limit")
	fs.StringVar(&f.namespace, "namespace", "", "namespace of --limit")
}

// inline returns the limit to send along, nil where a policy decides. An error names the flag that is to blame.
func (f *targetFlags) inline(fs *pflag.FlagSet) (*algo.Limit, error) {
	switch {
	case f.policy == "" && f.limit == "":
		return nil, errors.New("--policy: name a policy, or give a --limit such as 5/1m")
	case f.policy != "" && f.limit != "":
		return nil, errors.New("--limit: goes without --policy")
	case f.limit == "" && fs.Changed("algorithm"):
		return nil, errors.New("--algorithm: goes with --limit; a policy has its own")
	case f.limit == "":
		return nil, nil
	}
	a, ok := algo.ParseAlgorithm(f.algorithm)
	if !ok {
		return nil, fmt.Errorf("--algorithm: %q is not an algorithm, such as sliding_log or token_bucket", f.algorithm)
	}
	n, window, err := policy.ParseRate(f.limit)
	if err != nil {
		return nil, fmt.Errorf("--limit: %w", err)
	}
	return &algo.Limit{Algorithm: a, Limit: n, Window: window}, nil
}

// message is the target as weir.v1 has it. inline is what the method of that name returned.
func (f *targetFlags) message(inline *algo.Limit, key string) *weirv1.Target {
	t := &weirv1.Target{Policy: f.policy, Namespace: f.namespace, Key: key}
	if inline != nil {
		t.Limit = &weirv1.Limit{Algorithm: weirv1.Algorithm(inline.Algorithm), Limit: inline.Limit, WindowNs: int64(inline.Window)}
	}
	return t
}
