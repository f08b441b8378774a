package auth

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
)

const file = `
metrics: open
callers:
  - name: checkout
    tokens: [%s, %s]
    identities: ["dns:checkout.shop.svc", "uri:spiffe://example.org/checkout"]
    roles: [check]
    policies: [login, "partner-*"]
    namespaces: [default, "shop/*"]
  - name: support
    identities: ["cn:support", "dns:both.example.org"]
    roles: [refund, read]
    policies: ["*"]
  - name: operator
    tokens: [%s]
    roles: [admin, topology]
`

func TestList(t *testing.T) {
	old, fresh, admin := NewToken(), NewToken(), NewToken()
	l, err := Parse("access.yaml", fmt.Appendf(nil, file, Hash(old), Hash(fresh), Hash(admin)))
	if err != nil {
		t.Fatal(err)
	}
	name := func(c *Caller) string {
		if c == nil {
			return ""
		}
		return c.Name
	}
	for token, want := range map[string]string{
		old: "checkout", fresh: "checkout", admin: "operator",
		"": "", "x": "", old[:len(old)-1]: "", old + " ": "", strings.ToUpper(old): "", Hash(old): "", strings.TrimPrefix(Hash(old), hashPrefix): "",
	} {
		if got := name(l.ByToken(token)); got != want {
			t.Errorf("token of %q is taken for %q's", want, got)
		}
	}
	for _, c := range []struct {
		ids  []string
		want string
	}{
		{Identities([]string{"other", "checkout.shop.svc"}, nil, ""), "checkout"},
		{Identities(nil, []string{"spiffe://example.org/checkout"}, "nobody"), "checkout"},
		{Identities(nil, nil, "support"), "support"},
		{Identities([]string{"support"}, []string{"support"}, ""), ""},                       // the kind counts
		{Identities(nil, nil, "checkout.shop.svc"), ""},                                      // a common name is no alternative name
		{Identities([]string{"a.checkout.shop.svc"}, nil, ""), ""},                           // no suffixes
		{Identities([]string{"both.example.org", "checkout.shop.svc"}, nil, ""), "checkout"}, // the file's order
		{nil, ""},
	} {
		if got := name(l.ByIdentities(c.ids)); got != c.want {
			t.Errorf("%q: %q, want %q", c.ids, got, c.want)
		}
	}
	if !l.MetricsOpen || l.Len() != 3 {
		t.Errorf("%+v", l)
	}

	checkout, support, operator := l.ByToken(old), l.ByIdentities([]string{"cn:support"}), l.ByToken(admin)
	for _, c := range []struct {
		who  *Caller
		role Role
		want bool
	}{
		{checkout, RoleCheck, true}, {checkout, RoleRefund, false}, {checkout, RoleRead, false}, {checkout, RoleOpen, true}, {checkout, RoleTopology, false},
		{support, RoleRefund, true}, {support, RoleRead, true}, {support, RoleCheck, false}, {support, RoleRefund | RoleCheck, false},
		{operator, RoleAdmin, true}, {operator, RoleTopology, true}, {operator, RoleRead, false}, // no role has another in it
		{nil, RoleOpen, true}, {nil, RoleCheck, false}, {everybody(), RoleAdmin | RoleCheck, true},
	} {
		if got := c.who.Has(c.role); got != c.want {
			t.Errorf("%s, %v: %t", name(c.who), c.role, got)
		}
	}
	for _, c := range []struct {
		who        *Caller
		policy, ns string
		want       bool
	}{
		{checkout, "login", "", true}, {checkout, "login2", "", false}, {checkout, "logi", "", false}, {checkout, "=login", "", false},
		{checkout, "partner-", "", true}, {checkout, "partner-x", "", true}, {checkout, "partner", "", false}, {checkout, "", "", false},
		{support, "anything", "", true}, {operator, "login", "", false}, {nil, "login", "", false}, {everybody(), "x", "", true},
	} {
		if got := c.who.MayUsePolicy(c.policy); got != c.want {
			t.Errorf("%s, policy %q: %t", name(c.who), c.policy, got)
		}
	}
	for _, c := range []struct {
		who  *Caller
		ns   string
		want bool
	}{
		{checkout, "", true}, {checkout, "default", true}, {checkout, "shop/a", true}, {checkout, "shop", false},
		{support, "", false}, {nil, "", false}, {everybody(), "x", true},
	} {
		if got := c.who.MayUseNamespace(c.ns); got != c.want {
			t.Errorf("%s, namespace %q: %t", name(c.who), c.ns, got)
		}
	}
	if text := (RoleCheck | RoleAdmin).String() + " " + RoleOpen.String(); text != "check,admin open" {
		t.Error(text)
	}
}

// TestEmpty: a file with nobody in it lets nobody in, where no file would let everybody.
func TestEmpty(t *testing.T) {
	for _, text := range []string{"", "# nobody\n", "callers: []\n", "null"} {
		l, err := Parse("a", []byte(text))
		if err != nil || l.Len() != 0 || l.MetricsOpen || l.ByToken("") != nil || l.ByIdentities([]string{""}) != nil {
			t.Errorf("%q: %+v, %v", text, l, err)
		}
	}
}

func TestMistakes(t *testing.T) {
	good := Hash("x")
	caller := "callers:\n- {name: a, tokens: [" + good + "], roles: [read]}\n"
	for _, c := range []struct{ text, want string }{
		{"callers: 1", "a:1:10: callers: must be a list of callers"},
		{"caller: []", `a:1:1: there is no field "caller" here; there are callers, metrics`},
		{"metrics: closed", "a:1:10: metrics: must be open"},
		{"metrics: true", "a:1:10: metrics: must be text"},
		{"callers:", "a:1:1: callers: has no value"},
		{"- a", "a:1:1: must be a map of fields"},
		{"callers: [", "a:1:1: is not valid YAML near here"},
		{"callers: []\n---\n", "a second YAML document"},
		{"callers: []\ncallers: []", "a:2:1: callers: is given twice, first on line 1"},
		{"callers: [x]", "a:1:11: callers[0]: must be a map of fields"},
		{"callers:\n- {tokens: [" + good + "], roles: [read]}", "a:2:3: callers[0].name: is missing"},
		{"callers:\n- {name: a, roles: [read]}", "a:2:3: callers[0]: has neither tokens nor identities"},
		{"callers:\n- {name: a, tokens: [" + good + "]}", "callers[0].roles: is missing"},
		{"callers:\n- {name: a, tokens: [" + good + "], roles: [check]}", "callers[0].policies: is missing"},
		{"callers:\n- {name: a, tokens: [" + good + "], roles: [read], policies: [x]}", "callers[0].roles: has none that uses policies"},
		{"callers:\n- {name: a, tokens: [" + good + "], roles: [write]}", `callers[0].roles[0]: there is no role "write"; there are check, refund, read, topology, admin`},
		{"callers:\n- {name: a, tokens: [weir_secret], roles: [read]}", "a:2:22: callers[0].tokens[0]: must be the hash of a token"},
		{"callers:\n- {name: a, tokens: [sha256:12], roles: [read]}", "must be the hash of a token"},
		{"callers:\n- {name: a, tokens: [" + good + "00], roles: [read]}", "must be the hash of a token"},
		{"callers:\n- {name: a, tokens: [" + Hash("") + "], roles: [read]}", "is the hash of nothing"},
		{caller + "- {name: b, tokens: [" + good + "], roles: [read]}", "a:3:22: callers[1].tokens[0]: is given twice, first on line 2"},
		{caller + "- {name: a, tokens: [" + Hash("y") + "], roles: [read]}", "a:3:10: callers[1].name: is the name of another caller, on line 2"},
		{"callers:\n- {name: a, identities: [host], roles: [read]}", "callers[0].identities[0]: must begin with dns:"},
		{"callers:\n- {name: a, identities: [\"dns:*.x\"], roles: [read]}", "names one identity"},
		{"callers:\n- {name: a, identities: [\"dns:x\", \"dns:x\"], roles: [read]}", "identities[1]: is given twice"},
		{"callers:\n- {name: a, identities: [\"cn:\"], roles: [read]}", "must begin with dns:"},
		{"callers:\n- {name: a, identities: [\"cn:x\"], roles: [check], policies: [\"a*b\"]}", "policies[0]: * belongs at the end"},
		{"callers:\n- {name: a, identities: [\"cn:x\"], roles: [check], policies: [3]}", "policies[0]: must be text"},
		{"callers:\n- {name: a, identities: [\"cn:x\"], roles: [check], policies: login}", "policies: must be a list of policies"},
		{"x: &a [*a]", `there is no field "x"`},
		{"callers:\n- &c {name: a, identities: [\"cn:x\"], roles: [read]}\n- *c", "callers[1]: must be a map of fields"},
		{strings.Repeat("#", MaxFile+1), "is larger than"},
	} {
		l, err := Parse("a", []byte(c.text))
		if err == nil || l != nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%.80q: %v\nwant %s", c.text, err, c.want)
			continue
		}
		var one *Error
		if !errors.As(err, &one) || strings.Contains(err.Error(), "weir_secret") {
			t.Errorf("%.80q: %v", c.text, err)
		}
	}
	// All mistakes are listed, up to a bound.
	_, err := Parse("a", []byte("callers: [1, 2, 3]"))
	if n := strings.Count(err.Error(), "\n") + 1; n != 3 {
		t.Errorf("%d mistakes: %v", n, err)
	}
	_, err = Parse("a", []byte("callers: ["+strings.Repeat("1, ", 1000)+"]"))
	if n := strings.Count(err.Error(), "\n") + 1; n != maxErrors {
		t.Errorf("%d mistakes", n)
	}
	var many strings.Builder
	many.WriteString("callers:\n- {name: a, roles: [read], tokens: [")
	for i := range maxTokens + 1 {
		many.WriteString(Hash(fmt.Sprint(i)) + ",")
	}
	if _, err := Parse("a", []byte(many.String()+"]}")); err == nil || !strings.Contains(err.Error(), "there are more than 1000 tokens") {
		t.Errorf("%v", err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(fmt.Sprintf(file, Hash("a"), Hash("b"), Hash("c")))
	f.Add("callers: &a [*a, !!binary x, {<<: *a}]")
	f.Fuzz(func(t *testing.T, text string) {
		l, err := Parse("a", []byte(text))
		if (l == nil) == (err == nil) {
			t.Errorf("%v, %v", l, err)
		}
		if l != nil && l.ByToken("") != nil {
			t.Error("nothing is a token")
		}
	})
}

func BenchmarkByToken(b *testing.B) {
	l, err := Parse("a", fmt.Appendf(nil, file, Hash("a"), Hash("b"), Hash("c")))
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		l.ByToken("weir_0123456789012345678901234567890123456789012")
	}
}

// TestDocumentation: the example that people copy is right.
func TestDocumentation(t *testing.T) {
	page, err := os.ReadFile("../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(page), "```yaml\n")
	example, _, closed := strings.Cut(rest, "```")
	if !found || !closed {
		t.Fatal("docs/security.md has no example")
	}
	l, err := Parse("docs/security.md", []byte(example))
	if err != nil || l.Len() != 2 || l.MetricsOpen {
		t.Errorf("%+v, %v", l, err)
	}
	for _, role := range roleNames() {
		if !strings.Contains(string(page), "| `"+role+"` |") {
			t.Errorf("the role %s is not explained", role)
		}
	}
}
