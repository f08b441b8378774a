package node

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/limit"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// everybody is the context of a caller of a node without an access file.
func everybody(t *testing.T, n *Node) context.Context {
	t.Helper()
	ctx, denial := n.security.auth.Authorize(t.Context(), "http", auth.RoleKeys, auth.Credentials{})
	must.Equal(t, denial, nil)
	return ctx
}

func topOf(t *testing.T, n *Node, r *weirv1.TopKeysRequest) *weirv1.TopKeysResponse {
	t.Helper()
	return must.Value(n.TopKeys(everybody(t, n), r))(t)
}

// Whichever node decides for a key and whichever is asked, its decisions are added up, refusals that were remembered
// among them; and a member that does not answer is named.
func TestTopKeysOfThree(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t, "a b c", nil)
	inline := limit.Check{Target: limit.Target{Limit: &algo.Limit{Algorithm: algo.TokenBucket, Limit: 100,
		Window: time.Second}, Namespace: "api", Key: "bob"}, Cost: 1}
	const keys = 6 // of which a node decides fewer in all than it records between two ticks
	for k := range keys {
		for i := range 2 * (k + 1) {
			check(t, nodes[i%3], fmt.Sprint("key-", k))
		}
	}
	r, err := nodes[1].limiter.Check(t.Context(), []limit.Check{inline})
	must.True(t, err == nil && r[0].Err == nil, "%v %v", r, err)
	for _, n := range nodes {
		top := topOf(t, n, &weirv1.TopKeysRequest{})
		must.True(t, len(top.Keys) == keys+1 && slices.Equal(top.Members, []string{"a", "b", "c"}) &&
			len(top.Unreachable) == 0 && top.Node == n.cfg.Name, "%s: %v", n.cfg.Name, top)
		for i, k := range top.Keys[:keys] {
			decisions := int64(2 * (keys - i))
			expect.True(t, k.Key == fmt.Sprint("key-", keys-1-i) && k.Policy == "login" && k.Namespace == "" &&
				k.Decisions == decisions && k.Refused == max(decisions-5, 0) && k.Limit == 5 &&
				k.Used == min(decisions, 5) && k.DecisionsError == 0, "%s: %d: %v", n.cfg.Name, i, k)
		}
		k := top.Keys[keys]
		expect.True(t, k.Key == "bob" && k.Policy == "" && k.Namespace == "api" && k.Decisions == 1 && k.Used == 1 &&
			k.Limit == 100, "%s: %v", n.cfg.Name, k)
		p := top.Policies
		expect.True(t, len(p) == 2 && p[0].Policy == "login" && p[0].Allowed+p[0].Refused == keys*(keys+1) &&
			p[1].Policy == "(inline)" && p[1].Allowed == 1, "%s: %v", n.cfg.Name, p)
		first := topOf(t, n, &weirv1.TopKeysRequest{Order: weirv1.KeyOrder_KEY_ORDER_FULLEST, Limit: 1,
			Policy: "login"})
		expect.True(t, len(first.Keys) == 1 && first.Keys[0].Key == "key-5" && len(first.Policies) == 1,
			"%s: %v", n.cfg.Name, first)
	}
	for _, bad := range []*weirv1.TopKeysRequest{{Order: 4}, {Limit: 257}, {Policy: "a/b"}} {
		_, err := nodes[0].TopKeys(everybody(t, nodes[0]), bad)
		expect.True(t, err != nil, "%v is taken", bad)
	}
	nodes[2].peerServer.Stop()
	top := topOf(t, nodes[0], &weirv1.TopKeysRequest{})
	expect.True(t, slices.Equal(top.Members, []string{"a", "b"}) && slices.Equal(top.Unreachable, []string{"c"}) &&
		len(top.Keys) != 0, "while c does not answer: %v", top)
}

// A caller sees the keys of the policies and namespaces that it has the role for, and no others.
func TestTopKeysAreForWhoMaySee(t *testing.T) {
	t.Parallel()
	tokens := map[string]string{"all": auth.NewToken(), "login": auth.NewToken(), "api": auth.NewToken(),
		"read": auth.NewToken()}
	n := mustStart(t, func() Config {
		cfg := testConfig(t, "node")
		cfg.PolicyFile = testkit.WriteFile(t, "policies.yaml",
			"policies:\n  - {name: login, algorithm: sliding_log, limit: 5, window: 1m}\n  - {name: other, algorithm: sliding_log, limit: 5, window: 1m}\n")
		cfg.Security.AccessFile = testkit.WriteFile(t, "access.yaml", fmt.Sprintf(`callers:
  - {name: all, tokens: [%s], roles: [check, keys], policies: ["*"], namespaces: ["*"]}
  - {name: login, tokens: [%s], roles: [keys], policies: [login], grants: [{roles: [check], policies: ["*"]}]}
  - {name: api, tokens: [%s], roles: [keys], namespaces: [api]}
  - {name: read, tokens: [%s], roles: [read, check, refund, admin], policies: ["*"]}
`, auth.Hash(tokens["all"]), auth.Hash(tokens["login"]), auth.Hash(tokens["api"]), auth.Hash(tokens["read"])))
		return cfg
	}())
	awaitSettled(t, n)
	for _, body := range []string{
		`{"policy":"login","key":"k"}`, `{"policy":"other","key":"k"}`,
		`{"namespace":"api","limit":{"algorithm":"sliding_log","limit":5,"window":"1m"},"key":"k"}`,
		`{"limit":{"algorithm":"sliding_log","limit":5,"window":"1m"},"key":"k"}`,
	} {
		resp, text := send(t, n, "POST", "/v1/check", tokens["all"], body)
		must.Equal(t, resp.StatusCode, http.StatusOK, "%v", text)
	}
	for name, want := range map[string][]string{
		"all": {"/api/k", "/default/k", "login//k", "other//k"}, "login": {"login//k"}, "api": {"/api/k"}, "read": nil,
		"": nil,
	} {
		resp, text := send(t, n, "GET", "/v1/keys/top", tokens[name], "")
		if want == nil {
			expect.True(t, resp.StatusCode == http.StatusForbidden || resp.StatusCode == http.StatusUnauthorized,
				"%q: %d %s", name, resp.StatusCode, text)
			continue
		}
		var top struct {
			Keys     []struct{ Policy, Namespace, Key string }
			Policies []struct{ Policy string }
		}
		must.NoError(t, json.Unmarshal([]byte(text), &top), "%v", text)
		var got []string
		for _, k := range top.Keys {
			got = append(got, k.Policy+"/"+k.Namespace+"/"+k.Key)
		}
		slices.Sort(got)
		expect.True(t, slices.Equal(got, want), "%s sees %v, want %v", name, got, want)
		for _, p := range top.Policies {
			expect.True(t, strings.HasPrefix(p.Policy, "(") || name == "all" || p.Policy == name,
				"%s sees the policy %s", name, p.Policy)
		}
	}
	for _, tt := range []struct {
		token, path, body string
		want              int
	}{
		{"login", "/v1/keys/top?policy=other", "", http.StatusForbidden},
		{"login", "/v1/keys/top?policy=login", "", http.StatusOK},
		{"login", "/v1/keys/describe", `{"policy":"login","key":"k"}`, http.StatusOK},
		{"login", "/v1/keys/describe", `{"policy":"other","key":"k"}`, http.StatusForbidden},
		{"api", "/v1/keys/describe", `{"limit":{"algorithm":"sliding_log","limit":5,"window":"1m"},"key":"k"}`,
			http.StatusForbidden},
		{"read", "/v1/keys/describe", `{"policy":"login","key":"k"}`, http.StatusForbidden},
	} {
		method := "POST"
		if tt.body == "" {
			method = "GET"
		}
		if resp, text := send(t, n, method, tt.path, tokens[tt.token], tt.body); resp.StatusCode != tt.want {
			t.Errorf("%s: %s %s: %d %s, want %d", tt.token, tt.path, tt.body, resp.StatusCode, text, tt.want)
		}
	}
}

// Whichever node is asked, the one that decides for the key tells how it stands, and nothing is charged.
func TestDescribeOfThree(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t, "a b c", nil)
	for k := range 6 {
		key := fmt.Sprint("key-", k)
		for range 3 {
			check(t, nodes[k%3], key)
		}
		decider := ""
		for _, n := range nodes {
			target := limit.Target{Policy: "login", Key: key}
			st := must.Value(n.Describe(everybody(t, n), &target))(t)
			if decider == "" {
				decider = st.Node
			}
			units := int64(0)
			for _, l := range st.Limits {
				for _, r := range l.Returns {
					units += r.Units
				}
			}
			expect.True(t, st.Node == decider && len(st.Limits) == 1 && st.Limits[0].Remaining == 2 &&
				st.Limits[0].Limit == 5 && st.Limits[0].Window == time.Minute && units == 3,
				"%s of %s: %+v", n.cfg.Name, key, st)
		}
	}
	fresh := limit.Target{Policy: "login", Key: "never asked"}
	st, err := nodes[0].Describe(everybody(t, nodes[0]), &fresh)
	expect.True(t, err == nil && st.Limits[0].Remaining == 5 && st.Limits[0].Returns == nil, "%+v, %v", st, err)
	for _, bad := range []limit.Target{{Policy: "absent", Key: "k"}, {Policy: "login"}, {Key: "k"}} {
		for _, n := range nodes {
			st, err := n.Describe(everybody(t, n), &bad)
			expect.True(t, err != nil, "%+v: %+v", bad, st)
		}
	}
}

// Steps of members are added up one by one, with those that only one of them has.
func TestMergeActivity(t *testing.T) {
	step := func(n ...uint64) *peerv1.PolicyHistory {
		h := &peerv1.PolicyHistory{Policy: "p"}
		for _, n := range n {
			h.Steps = append(h.Steps, &weirv1.PolicyUse{Allowed: n})
		}
		return h
	}
	var c clusterActivity
	c.merge([]*peerv1.ActivityResponse{
		{AgeNs: int64(time.Second), Policies: []*peerv1.PolicyHistory{step(1, 2)}},
		{AgeNs: int64(2 * time.Second), Policies: []*peerv1.PolicyHistory{step(10, 20, 30)}},
	})
	var got []uint64
	for _, s := range c.policies[0].Steps {
		got = append(got, s.Allowed)
	}
	expect.True(t, slices.Equal(got, []uint64{11, 22, 30}) && c.age == time.Second, "%v, %v", got, c.age)
}
