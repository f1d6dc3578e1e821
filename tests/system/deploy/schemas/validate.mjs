// Prints what is wrong with each of the objects in OBJECTS, a JSON list, by the schemas of its kind.
const PACKAGES = {
  "gateway.networking.k8s.io": "@kubernetes-models/gateway-api",
  "monitoring.coreos.com": "@kubernetes-models/prometheus-operator",
};

for (const object of JSON.parse(process.env.OBJECTS)) {
  const [group, version] = object.apiVersion.split("/");
  const models = await import(`${PACKAGES[group]}/${group}/${version}/${object.kind}`);
  try {
    new models[object.kind](object).validate();
  } catch (error) {
    console.log(`${object.kind}: ${error.message}`);
  }
}
