package auth

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/internal/strictyaml"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
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

// ids are the identities in a certificate.
func ids(dns, uris []string, commonName string) []string {
	leaf := &x509.Certificate{DNSNames: dns, Subject: pkix.Name{CommonName: commonName}}
	for _, text := range uris {
		uri, err := url.Parse(text)
		if err != nil {
			uri = &url.URL{Opaque: text}
		}
		leaf.URIs = append(leaf.URIs, uri)
	}
	return Identities(leaf)
}

// roleOf is the role in which a caller of the file uses policies.
func roleOf(c *Caller) Role {
	if c.Has(RoleCheck) {
		return RoleCheck
	}
	return RoleRefund
}

func knows(l *Callers, token string) bool {
	who, _ := l.ByToken(token)
	return who != nil
}

func TestList(t *testing.T) {
	old, fresh, admin := NewToken(), NewToken(), NewToken()
	l := must.Value(Parse("access.yaml", fmt.Appendf(nil, file, Hash(old), Hash(fresh), Hash(admin))))(t)
	name := func(c *Caller) string {
		if c == nil {
			return ""
		}
		return c.Name
	}
	for token, want := range map[string]string{
		old: "checkout", fresh: "checkout", admin: "operator",
		"": "", "x": "", old[:len(old)-1]: "", old + " ": "", strings.ToUpper(old): "", Hash(old): "",
		strings.TrimPrefix(Hash(old), hashPrefix): "",
	} {
		who, _ := l.ByToken(token)
		got := name(who)
		expect.True(t, got == want, "token of %q is taken for %q's", want, got)
	}
	for _, c := range []struct {
		ids  []string
		want string
	}{
		{ids([]string{"other", "checkout.shop.svc"}, nil, ""), "checkout"},
		{ids(nil, []string{"spiffe://example.org/checkout"}, "nobody"), "checkout"},
		{ids(nil, nil, "support"), "support"},
		{ids([]string{"support"}, []string{"support"}, ""), ""}, // the kind counts
		// a common name is no alternative name
		{ids(nil, nil, "checkout.shop.svc"), ""},
		{ids([]string{"a.checkout.shop.svc"}, nil, ""), ""},                           // no suffixes
		{ids([]string{"both.example.org", "checkout.shop.svc"}, nil, ""), "checkout"}, // the file's order
		{nil, ""},
	} {
		expect.Equal(t, name(l.ByIdentities(c.ids)), c.want, "%q", c.ids)
	}
	expect.True(t, l.MetricsOpen && l.Len() == 3, "%+v", l)

	checkout, _ := l.ByToken(old)
	operator, _ := l.ByToken(admin)
	support := l.ByIdentities([]string{"cn:support"})
	for _, c := range []struct {
		who  *Caller
		role Role
		want bool
	}{
		{checkout, RoleCheck, true}, {checkout, RoleRefund, false}, {checkout, RoleRead, false},
		{checkout, RoleOpen, true}, {checkout, RoleTopology, false},
		{support, RoleRefund, true}, {support, RoleRead, true}, {support, RoleCheck, false},
		{support, RoleRefund | RoleCheck, false},
		// no role has another in it
		{operator, RoleAdmin, true}, {operator, RoleTopology, true}, {operator, RoleRead, false},
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
		{checkout, "login", "", true}, {checkout, "login2", "", false}, {checkout, "logi", "", false},
		{checkout, "=login", "", false},
		{checkout, "partner-", "", true}, {checkout, "partner-x", "", true}, {checkout, "partner", "", false},
		{checkout, "", "", false},
		{support, "anything", "", true}, {operator, "login", "", false}, {nil, "login", "", false},
		{everybody(), "x", "", true},
	} {
		if got := c.who.MayUsePolicy(roleOf(c.who), c.policy); got != c.want {
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
		if got := c.who.MayUseNamespace(roleOf(c.who), c.ns); got != c.want {
			t.Errorf("%s, namespace %q: %t", name(c.who), c.ns, got)
		}
	}
	expect.Equal(t, (RoleCheck|RoleAdmin).String()+" "+RoleOpen.String(), "check,admin open")
}

// TestEmpty: a file with nobody in it lets nobody in, where no file would let everybody.
func TestEmpty(t *testing.T) {
	for _, text := range []string{"", "# nobody\n", "callers: []\n", "null"} {
		l, err := Parse("a", []byte(text))
		expect.True(t, err == nil && l.Len() == 0 && !l.MetricsOpen && !knows(l, "") &&
			l.ByIdentities([]string{""}) == nil, "%q: %+v, %v", text, l, err)
	}
}

// TestGrants: roles are for the policies and namespaces that they stand beside, and for no others.
func TestGrants(t *testing.T) {
	l := must.Value(Parse("a", []byte(`
callers:
  - name: shop
    identities: ["cn:shop"]
    roles: [check, read]
    policies: ["*"]
    grants:
      - {roles: [refund], policies: [login], namespaces: [carts]}
      - {roles: [check], namespaces: [shop]}
      - {roles: [topology]}
  - name: robot
    identities: ["cn:robot"]
    grants: [{roles: [refund], policies: ["partner-*"]}]
`)))(t)
	shop, robot := l.ByIdentities([]string{"cn:shop"}), l.ByIdentities([]string{"cn:robot"})
	expect.True(t, shop.Roles == RoleCheck|RoleRead|RoleRefund|RoleTopology && robot.Roles == RoleRefund,
		"%v, %v", shop.Roles, robot.Roles)
	for _, c := range []struct {
		who    *Caller
		role   Role
		policy string
		want   bool
	}{
		{shop, RoleCheck, "any", true}, {shop, RoleCheck, "login", true}, {shop, RoleRefund, "login", true},
		{shop, RoleRefund, "any", false},
		{robot, RoleCheck, "partner-x", false}, {robot, RoleRefund, "partner-x", true},
		{robot, RoleRefund, "login", false},
	} {
		if got := c.who.MayUsePolicy(c.role, c.policy); got != c.want {
			t.Errorf("%s, %v of %s: %t", c.who.Name, c.role, c.policy, got)
		}
	}
	for namespace, want := range map[string][2]bool{"shop": {true, false}, "carts": {false, true}, "": {false, false}} {
		check, refund := shop.MayUseNamespace(RoleCheck, namespace), shop.MayUseNamespace(RoleRefund, namespace)
		expect.True(t, check == want[0] && refund == want[1], "%q: %t, %t", namespace, check, refund)
	}
}

// TestExpires: a token counts before the instant that the file gives.
func TestExpires(t *testing.T) {
	l := must.Value(Parse("a", fmt.Appendf(nil, `
callers:
  - name: shop
    tokens: [%s, {hash: %s, expires: 2027-01-31}, {hash: %s, expires: "2027-01-31T12:00:00+02:00"}, {hash: %s}]
    roles: [read]
`, Hash("a"), Hash("b"), Hash("c"), Hash("d"))))(t)
	day := time.Date(2027, 1, 31, 0, 0, 0, 0, time.UTC)
	for token, want := range map[string]time.Time{"a": {}, "b": day, "c": day.Add(10 * time.Hour), "d": {}} {
		who, expires := l.ByToken(token)
		expect.True(t, who != nil && expires.Equal(want), "%s: %v, %v", token, who, expires)
	}
}

// TestSPIFFE: ids are written with or without uri:, and count in an SVID only: a certificate with one URI, of no
// authority.
func TestSPIFFE(t *testing.T) {
	l := must.Value(Parse("a", []byte(`
callers:
  - {name: a, identities: ["spiffe://example.org/a", "uri:https://example.org/a"], roles: [read]}
  - {name: b, identities: ["uri:spiffe://example.org/b"], roles: [read]}
`)))(t)
	for _, c := range []struct {
		uris []string
		ca   bool
		want string
	}{
		{[]string{"spiffe://example.org/a"}, false, "a"},
		{[]string{"spiffe://example.org/b"}, false, "b"},
		{[]string{"SPIFFE://example.org/b"}, false, "b"},
		{[]string{"spiffe://example.org/c"}, false, ""},
		{[]string{"spiffe://example.org/a/"}, false, ""},
		{[]string{"spiffe://example.org.evil.org/a"}, false, ""},
		{[]string{"spiffe://example.org/a"}, true, ""},
		{[]string{"spiffe://example.org/b", "https://other.org"}, false, ""},
		{[]string{"spiffe://example.org/b", "https://example.org/a"}, false, "a"},
	} {
		leaf := &x509.Certificate{IsCA: c.ca}
		for _, text := range c.uris {
			uri := must.Value(url.Parse(text))(t)
			leaf.URIs = append(leaf.URIs, uri)
		}
		got := ""
		if who := l.ByIdentities(Identities(leaf)); who != nil {
			got = who.Name
		}
		expect.Equal(t, got, c.want, "%v", c.uris)
	}
}

func TestMistakes(t *testing.T) {
	words := strings.NewReplacer(`\n`, "\n", "GOOD", Hash("x"), "OTHER", Hash("y"), "NOTHING", Hash(""), "LARGE",
		strings.Repeat("#", MaxFile+1))
	testkit.Table(t, "testdata/mistakes.txt", func(t *testing.T, text, want string) {
		l, err := Parse("a", []byte(words.Replace(text)))
		must.ErrorContains(t, err, want)
		var list strictyaml.Errors
		expect.True(t, l == nil && errors.As(err, &list) && !strings.Contains(err.Error(), "weir_secret"), "%v", err)
	})
	// All mistakes are listed, up to a bound.
	_, err := Parse("a", []byte("callers: [1, 2, 3]"))
	expect.Equal(t, strings.Count(err.Error(), "\n")+1, 3, "mistakes: %v", err)
	_, err = Parse("a", []byte("callers: ["+strings.Repeat("1, ", 2000)+"]"))
	expect.Equal(t, strings.Count(err.Error(), "\n")+1, strictyaml.MaxErrors+1, "mistakes")
	var many strings.Builder
	many.WriteString("callers:\n- {name: a, roles: [read], tokens: [")
	for i := range maxTokens + 1 {
		many.WriteString(Hash(fmt.Sprint(i)) + ",")
	}
	expect.ErrorContains(t, expect.Err(Parse("a", []byte(many.String()+"]}"))), "there are more than 1000 tokens")
}

func FuzzParse(f *testing.F) {
	f.Add(fmt.Sprintf(file, Hash("a"), Hash("b"), Hash("c")))
	f.Add("callers: &a [*a, !!binary x, {<<: *a}]")
	f.Fuzz(func(t *testing.T, text string) {
		l, err := Parse("a", []byte(text))
		expect.True(t, (l == nil) != (err == nil), "%v, %v", l, err)
		expect.True(t, l == nil || !knows(l, ""), "nothing is a token")
	})
}

// TestDocumentation: the example that people copy is right.
func TestDocumentation(t *testing.T) {
	page := must.Value(os.ReadFile("../docs/security.md"))(t)
	_, rest, found := strings.Cut(string(page), "```yaml\n")
	example, _, closed := strings.Cut(rest, "```")
	must.True(t, found && closed, "docs/security.md has no example")
	l, err := Parse("docs/security.md", []byte(example))
	expect.True(t, err == nil && l.Len() == 2 && !l.MetricsOpen, "%+v, %v", l, err)
	for _, role := range roleNames() {
		expect.True(t, strings.Contains(string(page), "| `"+role+"` |"), "the role %s is not explained", role)
	}
}
