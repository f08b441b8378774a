package dial

import (
	"errors"
	"fmt"

	"github.com/spf13/pflag"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/policy"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// Target is what a command has decided about, by its flags: a policy, or a limit that it sends along.
type Target struct {
	Policy, Namespace, limit, algorithm string
}

// Register adds the flags.
func (f *Target) Register(fs *pflag.FlagSet) {
	fs.StringVar(&f.Policy, "policy", "", "policy to decide by")
	fs.StringVar(&f.limit, "limit", "", "limit to decide by in place of a policy, as 5/1m")
	fs.StringVar(&f.algorithm, "algorithm", "sliding_log", "algorithm of --limit")
	fs.StringVar(&f.Namespace, "namespace", "", "namespace of --limit")
}

// Inline returns the limit to send along, nil where a policy decides. An error names the setting that is to blame.
func (f *Target) Inline(fs *pflag.FlagSet) (*algo.Limit, error) {
	switch {
	case f.Policy == "" && f.limit == "":
		return nil, errors.New("policy: name a policy, or give a --limit such as 5/1m")
	case f.Policy != "" && f.limit != "":
		return nil, errors.New("limit: goes without --policy")
	case f.limit == "" && fs.Changed("algorithm"):
		return nil, errors.New("algorithm: goes with --limit; a policy has its own")
	case f.limit == "":
		return nil, nil
	}
	a, ok := algo.ParseAlgorithm(f.algorithm)
	if !ok {
		return nil, fmt.Errorf("algorithm: %q is not an algorithm, such as sliding_log or token_bucket", f.algorithm)
	}
	n, window, err := policy.ParseRate(f.limit)
	if err != nil {
		return nil, fmt.Errorf("limit: %w", err)
	}
	return &algo.Limit{Algorithm: a, Limit: n, Window: window}, nil
}

// Message is the target as weir.v1 has it. inline is what the method of that name returned.
func (f *Target) Message(inline *algo.Limit, key string) *weirv1.Target {
	t := &weirv1.Target{Policy: f.Policy, Namespace: f.Namespace, Key: key}
	if inline != nil {
		t.Limit = &weirv1.Limit{Algorithm: weirv1.Algorithm(inline.Algorithm), Limit: inline.Limit, WindowNs: int64(inline.Window)}
	}
	return t
}
