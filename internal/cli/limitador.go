package cli

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v4"

	"github.com/weirlimit/weir/internal/strictyaml"
)

// limitadorFile is the content of a limits file of Limitador.
type limitadorFile struct {
	Namespaces []limitadorNamespace // in the order of the file
	Limits     int
}

// limitadorNamespace is the limits of one namespace, which becomes a domain of Envoy.
type limitadorNamespace struct {
	Name string
	root entry
}

// entry is a descriptor in the format of envoyproxy/ratelimit.
type entry struct {
	Key         string         `yaml:"key"`
	Value       *string        `yaml:"value,omitempty"`
	Share       bool           `yaml:"share_threshold,omitempty"`
	Limit       *limitadorRate `yaml:"rate_limit,omitempty"`
	Descriptors []*entry       `yaml:"descriptors,omitempty"`
	except      bool           // a condition with != excludes the value
	line        int            // line of the limit in the file
}

// limitadorRate is a rate_limit in the format of envoyproxy/ratelimit.
type limitadorRate struct {
	Name       string `yaml:"name,omitempty"`
	Unlimited  bool   `yaml:"unlimited,omitempty"`
	Unit       string `yaml:"unit,omitempty"`
	Multiplier int64  `yaml:"unit_multiplier,omitempty"`
	Requests   *int64 `yaml:"requests_per_unit,omitempty"`
}

// looksLikeLimitador reports whether a file is one of Limitador: its root is a list, that of all other files a map.
func looksLikeLimitador(data []byte) bool {
	root := strictyaml.New("", data).Root().Node
	return root != nil && root.Kind == yaml.SequenceNode
}

var fields = []string{"id", "namespace", "name", "max_value", "seconds", "conditions", "variables"}

// parseLimitador parses a limits file. name is its name in mistakes. An error is strictyaml.Errors.
//
// It understands conditions that compare an entry of a descriptor with a text, by == or !=; other CEL expressions are
// mistakes. A converted file may limit differently: docs/migrating.md has the differences.
func parseLimitador(name string, data []byte) (*limitadorFile, error) {
	r := reader{Decoder: strictyaml.New(name, data), file: new(limitadorFile)}
	for f := range r.Maps(r.Root(), "limits", fields) {
		r.limit(f)
	}
	if err := r.Err(); err != nil {
		return nil, err
	}
	return r.file, nil
}

type reader struct {
	*strictyaml.Decoder
	file *limitadorFile
}

// limit reads one limit into the tree of its namespace.
func (r *reader) limit(f strictyaml.Fields) {
	before := r.Count()
	namespace, _ := r.Text(r.Required(f, "namespace", "example.org"), 1, strictyaml.MaxFile)
	limit := &limitadorRate{Unit: "second"}
	limit.Name, _ = r.Text(f.Field("name"), 0, strictyaml.MaxFile)
	requests := r.Integer(r.Required(f, "max_value", "10"), 0, math.MaxUint32)
	limit.Requests = &requests
	switch seconds := r.Integer(r.Required(f, "seconds", "60"), 1, 366*24*3600); seconds {
	case 1:
	case 60:
		limit.Unit = "minute"
	case 3600:
		limit.Unit = "hour"
	case 86400:
		limit.Unit = "day"
	default:
		limit.Multiplier = seconds
	}
	parts := r.parts(f)
	switch {
	case r.Count() > before:
	case len(parts) == 0:
		r.Fail(f.At, f.Path, "has neither conditions nor variables: Envoy's format has no limit of all descriptors of a domain; let Envoy send an entry such as generic_key, and name it in a condition")
	default:
		r.add(namespace, parts, limit, f)
	}
}

// limitadorPart is one condition or variable.
type limitadorPart struct {
	key, value string
	variable   bool
	not        bool
}

var (
	keyOf     = `(?:descriptors\[0\]\[(?:'([^']+)'|"([^"]+)")\]|descriptors\[0\]\.([A-Za-z_]\w*)|([A-Za-z_][\w.\-]*))`
	condition = regexp.MustCompile(`^\s*` + keyOf + `\s*(==|!=)\s*(?:'([^'\\]*)'|"([^"\\]*)")\s*$`)
	variable  = regexp.MustCompile(`^\s*` + keyOf + `\s*$`)
)

// parts reads the conditions, and then the variables.
func (r *reader) parts(f strictyaml.Fields) (list []limitadorPart) {
	each := func(field string, pattern *regexp.Regexp, understood string, take func(one strictyaml.Field, m []string)) {
		for one := range r.Elements(f.Field(field), field) {
			text, valid := r.Text(one, 0, strictyaml.MaxFile)
			switch m := pattern.FindStringSubmatch(text); {
			case !valid:
			case m == nil:
				r.Fail(one.Node, one.Path, "is not understood: only %s", understood)
			default:
				take(one, m)
			}
		}
	}
	each("conditions", condition, `descriptors[0]['KEY'] == 'VALUE' and != are`,
		func(one strictyaml.Field, m []string) {
			value := m[6] + m[7]
			if value == "" || strings.HasSuffix(value, "*") {
				r.Fail(one.Node, one.Path,
					"cannot be said in Envoy's format: a value must be given there, and one that ends in * stands for all that begin so")
				return
			}
			list = append(list, limitadorPart{key: m[1] + m[2] + m[3] + m[4], value: value, not: m[5] == "!="})
		})
	each("variables", variable, `descriptors[0]['KEY'] is`, func(_ strictyaml.Field, m []string) {
		list = append(list, limitadorPart{key: m[1] + m[2] + m[3] + m[4], variable: true})
	})
	return list
}

// add puts a limit into the tree of its namespace.
func (r *reader) add(namespace string, parts []limitadorPart, limit *limitadorRate, f strictyaml.Fields) {
	i := slices.IndexFunc(r.file.Namespaces, func(n limitadorNamespace) bool { return n.Name == namespace })
	if i < 0 {
		i = len(r.file.Namespaces)
		r.file.Namespaces = append(r.file.Namespaces, limitadorNamespace{Name: namespace})
	}
	at := &r.file.Namespaces[i].root
	for _, p := range parts {
		switch {
		case p.variable:
			at = at.child(p.key, nil, false)
		case p.not:
			// The excluded value becomes unlimited, unless another limit is for it (exempt). All other values share one
			// counter.
			any := "*"
			at.child(p.key, &p.value, false).except = true
			at = at.child(p.key, &any, true)
		default:
			at = at.child(p.key, &p.value, false)
		}
	}
	if at.Limit != nil {
		r.Fail(f.At, f.Path, "has the conditions and variables of the limit in line %d: Envoy's format has one limit for a descriptor; use a policy with several limits", at.line)
		return
	}
	at.Limit, at.line = limit, f.At.Line
	r.file.Limits++
}

// child returns the child with this key and value (nil: any value). It adds the child if there is none.
func (e *entry) child(key string, value *string, share bool) *entry {
	for _, c := range e.Descriptors {
		if c.Key == key && (c.Value == nil) == (value == nil) && (value == nil || *c.Value == *value) {
			return c
		}
	}
	c := &entry{Key: key, Value: value, Share: share}
	e.Descriptors = append(e.Descriptors, c)
	return c
}

// Envoy returns the namespace in the format of envoyproxy/ratelimit. Limitador charges all limits of a request or none,
// so charge is all_or_none.
func (n *limitadorNamespace) Envoy() ([]byte, error) {
	n.root.exempt()
	return yaml.Marshal(struct {
		Domain      string   `yaml:"domain"`
		Charge      string   `yaml:"charge"`
		Descriptors []*entry `yaml:"descriptors"`
	}{n.Name, "all_or_none", n.root.Descriptors})
}

// exempt makes the entries that conditions exclude unlimited, unless they have a limit.
func (e *entry) exempt() {
	for _, c := range e.Descriptors {
		if c.except && c.Limit == nil && len(c.Descriptors) == 0 {
			c.Limit = &limitadorRate{Unlimited: true}
		}
		c.exempt()
	}
}

// FileName returns a name for the namespace's file.
func (n *limitadorNamespace) FileName() string {
	return notInName.ReplaceAllString(fmt.Sprintf("%.100s", n.Name), "_") + ".yaml"
}

var notInName = regexp.MustCompile(`[^a-zA-Z0-9._-]`)
