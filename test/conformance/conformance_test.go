package conformance

import (
	"cmp"
	_ "embed"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/internal/node"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

//go:embed testdata/cases.txt
var cases string

const policies = `policies:
  - {name: five, algorithm: sliding_log, limit: 5, window: 1h, on_error: closed}
  - {name: jobs, algorithm: concurrency, limit: 2, ttl: 1m, on_error: closed}
  - {name: shy, algorithm: concurrency, limit: 1, ttl: 1m, shadow: true, on_error: closed}
  - {name: priced, algorithm: sliding_log, limit: 50, window: 1h, on_error: closed, prices: {input: 1, output: 4}, estimate: 7}
  - {name: free, algorithm: concurrency, limit: 1, ttl: 1m, on_error: closed, overrides: [{prefix: "http", unlimited: true}, {prefix: "grpc", unlimited: true}]}
`

const envoyFile = `
domain: edge
charge: independent
descriptors:
  - {key: five, rate_limit: {policy: five}}
  - {key: none, rate_limit: {policy: none}}
`

// tokens are those of the callers, by name. No access file has the stranger's.
var tokens = map[string]string{"": "token-of-all", "reader": "token-of-reader", "other": "token-of-other",
	"weak": "token-of-weak", "stranger": "token-of-stranger"}

func accessFile() string {
	return fmt.Sprintf(`callers:
  - {name: all, tokens: [%s], roles: [check, charge, refund], policies: ["*"], namespaces: ["*"]}
  - {name: reader, tokens: [%s], roles: [read]}
  - {name: other, tokens: [%s], roles: [check], policies: [jobs], namespaces: [other]}
  - {name: weak, tokens: [%s], roles: [check], policies: ["*"], namespaces: ["*"]}
`, auth.Hash(tokens[""]), auth.Hash(tokens["reader"]), auth.Hash(tokens["other"]), auth.Hash(tokens["weak"]))
}

// call is what is asked, in the terms of package limit.
type call struct {
	op, policy, key string
	limit           []string // algorithm, limit and window of one that is sent along
	cost            *int64
	usage           map[string]int64
	partial, exact  bool
	rid, id, class  string
	ttl             time.Duration
	as              string
}

// amount is the cost, which is 1 where it is left out.
func (c *call) amount() int64 {
	switch {
	case c.op == "peek":
		return 0
	case c.cost == nil:
		return 1
	}
	return *c.cost
}

// answer is what a call is answered, as a line of the table has it, and the id of what it holds.
type answer struct{ text, id string }

func decided(allowed bool, remaining int64, id string) answer {
	word := map[bool]string{true: "allowed", false: "refused"}[allowed]
	return answer{fmt.Sprint(word, " ", remaining), id}
}

func given(units, excess int64) answer {
	if excess > 0 {
		return answer{text: fmt.Sprintf("units %d excess %d", units, excess)}
	}
	return answer{text: fmt.Sprintf("units %d", units)}
}

// failed is an error, of an element of a list or of the whole.
func failed(kind, field string) []answer {
	if _, of, list := strings.Cut(field, "]."); list {
		field = of
	}
	return []answer{{text: strings.TrimSpace("error " + kind + " " + field)}}
}

// protocol is one of those that callers speak.
type protocol struct {
	name    string
	anyKey  bool // it takes any value for a key
	noKinds bool // its errors do not tell most kinds apart
	noRest  bool // it tells what remains of what it admits only
	// fields are the names that the protocol has for fields of the table.
	fields map[string]string
	// ask has calls carried out in one request.
	ask func(t *testing.T, n *node.Node, calls []call) []answer
}

// cluster is two nodes with all protocols.
func cluster(t *testing.T) []*node.Node {
	dir := t.TempDir()
	access := testkit.WriteFile(t, "access.yaml", accessFile())
	must.NoError(t, os.WriteFile(dir+"/edge.yaml", []byte(envoyFile), 0o600))
	var nodes []*node.Node
	for _, name := range []string{"a", "b"} {
		cfg := node.Config{
			Name: name, Bind: "127.0.0.1", HTTPPort: node.PortAny, GRPCPort: node.PortAny, RESPPort: node.PortAny,
			GossipPort: node.PortAny, PeerPort: node.PortAny,
			Policies: must.Value(policy.Parse("policies.yaml", []byte(policies)))(t), InlineMaxWindow: 24 * time.Hour,
			Envoy: node.Envoy{Dir: dir}, Security: node.Security{AccessFile: access},
			Timeout: 20 * time.Second, Grace: 5 * time.Second, Logger: slog.New(slog.DiscardHandler),
		}
		if len(nodes) > 0 {
			cfg.Join = []string{nodes[0].GossipAddr()}
		}
		n := must.Value(node.Start(t.Context(), cfg))(t)
		t.Cleanup(n.Stop)
		nodes = append(nodes, n)
	}
	for _, n := range nodes {
		select {
		case <-n.Settled():
		case <-time.After(testkit.Patience):
			t.Fatal(n.Ready())
		}
	}
	return nodes
}

// TestProtocols: each protocol answers each case of the table as it says.
func TestProtocols(t *testing.T) {
	nodes := cluster(t)
	for _, p := range protocols(t, nodes) {
		t.Run(p.name, func(t *testing.T) {
			for _, text := range strings.Split(cases, "\n== ")[1:] {
				head, lines, _ := strings.Cut(text, "\n")
				name, only, some := strings.Cut(head, " : ")
				if some && !slices.Contains(strings.Fields(only), p.name) {
					continue
				}
				t.Run(name, func(t *testing.T) { p.run(t, nodes, p.name+" "+name+" ", lines) })
			}
		})
	}
}

// run carries out the lines of a case, whose keys begin with a prefix.
func (p *protocol) run(t *testing.T, nodes []*node.Node, prefix, lines string) {
	id := ""
	for i, line := range strings.Split(strings.TrimSpace(lines), "\n") {
		asked, wanted, _ := strings.Cut(line, " => ")
		if shared, own, differ := strings.Cut(wanted, " | "); differ && p.anyKey {
			wanted = own
		} else {
			wanted = shared
		}
		for shared, own := range p.fields {
			wanted = strings.ReplaceAll(wanted, shared, own)
		}
		var calls []call
		for _, one := range strings.Split(asked, " & ") {
			calls = append(calls, parseCall(t, one, prefix, id))
		}
		answers := p.ask(t, nodes[i%len(nodes)], calls)
		var texts []string
		for _, a := range answers {
			texts = append(texts, a.text)
			if id = cmp.Or(a.id, id); a.id == "" && strings.HasSuffix(wanted, " none") {
				texts[0] += " none"
			}
		}
		got := strings.Join(texts, " & ")
		if p.noRest {
			wanted = refusedRest.ReplaceAllString(wanted, "refused 0")
		}
		if p.noKinds {
			got, wanted = withoutKinds(got), withoutKinds(wanted)
		}
		expect.True(t, got == wanted, "line %d: %s\nanswered %s\nwant     %s", i+1, asked, got, wanted)
	}
}

var refusedRest = regexp.MustCompile(`refused \d+`)

// withoutKinds leaves the kinds of errors out, but for those about who asks, and the names of fields, which differ.
func withoutKinds(answers string) string {
	list := strings.Split(answers, " & ")
	for i, one := range list {
		if f := strings.Fields(one); f[0] == "error" {
			list[i] = "error"
			if len(f) > 1 && (f[1] == "denied" || f[1] == "unauthenticated") {
				list[i] += " " + f[1]
			}
		}
	}
	return strings.Join(list, " & ")
}

func parseCall(t *testing.T, text, prefix, id string) call {
	words := strings.Fields(text)
	c := call{op: words[0]}
	target, of, _ := strings.Cut(words[1], "/")
	if list, inline := strings.CutPrefix(target, "limit="); inline {
		c.limit = strings.Split(list, ",")
	} else {
		c.policy = target
	}
	c.key = map[string]string{"": "", "NOTEXT": "\xff", "LONGNOTEXT": strings.Repeat("k", 2000) + "\xff"}[of]
	switch of {
	case "LONG":
		c.key = prefix + strings.Repeat("k", 2000)
	case "LONGEST":
		c.key = prefix + strings.Repeat("k", limit.MaxKey-len(prefix))
	case "HUGE":
		c.key = strings.Repeat("k", 9<<20)
	case "", "NOTEXT", "LONGNOTEXT":
	default:
		c.key = prefix + of
	}
	for _, word := range words[2:] {
		name, value, _ := strings.Cut(word, "=")
		switch name {
		case "cost":
			n := new(int64)
			_ = must.Value(fmt.Sscan(value, n))(t)
			c.cost = n
		case "usage":
			c.usage = make(map[string]int64)
			for _, one := range strings.Split(value, ",") {
				class, n, _ := strings.Cut(one, ":")
				var units int64
				_ = must.Value(fmt.Sscan(n, &units))(t)
				c.usage[class] = units
			}
		case "partial":
			c.partial = true
		case "exact":
			c.exact = true
		case "rid":
			c.rid = long(value)
		case "class":
			c.class = long(value)
		case "id":
			c.id = strings.ReplaceAll(value, "$", id)
		case "ttl":
			c.ttl = must.Value(time.ParseDuration(value))(t)
		case "as":
			c.as = value
		default:
			t.Fatalf("%s: %s is unknown", text, word)
		}
	}
	return c
}

// long is a value, or for LONG one that is longer than any may be.
func long(value string) string {
	if value == "LONG" {
		return strings.Repeat("x", 200)
	}
	return value
}
